"""The owner of a sequence's KV pages, as far as the cache salt says.

    OWNER            the tenant's salt of the API key (`Caller.salted`); "": tenants share the pages
    OWNER NUL HEX    at an engine behind an orchestrator, which has one key for all its tenants: HEX is the salt that it
                     gives the requests of one of them (stages/orchestrator/request_ids.py)

A request's own salt does not count: with salts of its own a tenant is still one.  What counts is the form of the text:
a tenant that shares its pages may send a salt of that form.  So HEX names a tenant only to those who know its tenants,
and bounds in total hold besides.
"""

from __future__ import annotations

import re

from pipeline.api.adapter_salt import without_adapter

# As `RequestName.salted` makes it.
_FORWARDED = re.compile(r"([0-9a-f]{32}) ")


def owner_of(salt: str) -> str:
    """The owner of the pages of a sequence with this salt."""
    tenant, separator, rest = without_adapter(salt)[0].partition("\0")
    if not separator:  # the model's pages are shared by all API keys
        tenant, rest = "", tenant
    found = _FORWARDED.match(rest)
    return f"{tenant}\0{found[1]}" if found else tenant


def key_owner(owner: str) -> str:
    """The part of an owner that an engine's API keys distinguish; "": none does."""
    return owner.partition("\0")[0]


def payer_of(owner: str) -> str:
    """Who pays for the pages of an owner whose tenant is not known: all such owners of an API key are one."""
    return key_owner(owner) or ("\0" if owner else "")


def forwarded_salt(owner: str) -> str:
    """The salt that an orchestrator has given the owner's requests; "": none."""
    return owner.partition("\0")[2]
