"""The header `anthropic-version`: which version of Anthropic's API a request is of.

What servers support of it has had one form since `VERSION`: later versions are accepted, earlier ones had other events.
"""

from __future__ import annotations

import re

from pipeline.errors import InvalidRequest

PATH = "/v1/messages"  # and below
HEADER = "Anthropic-Version"
VERSION = "2023-06-01"
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def check(given: str | None) -> None:
    """Check the header's value; None: it was not sent, which is `VERSION`. Raises `InvalidRequest`."""
    version = VERSION if given is None else given
    if not _DATE.fullmatch(version) or version < VERSION:
        name = HEADER.lower()
        raise InvalidRequest(f"{name} is {version[:40]!r}; send {VERSION} or the date of a later version", name)
