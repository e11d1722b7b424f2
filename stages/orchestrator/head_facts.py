"""The fields of a request's head that the handlers of every request use."""

from __future__ import annotations

import re
from typing import NamedTuple

from aiohttp import web
from multidict import CIMultiDictProxy

from pipeline.api.idempotency_key import HEADER as KEY

_CLIENT_ID = re.compile(r"[!-~]{1,128}")
_PASSED_ON = (
    "Content-Type",
    "Content-Encoding",
    "Anthropic-Version",
    "Anthropic-Beta",
    "traceparent",
    "tracestate",
)


class HeadFacts(NamedTuple):
    """What the handlers use of a head's fields. A client sends nearly the same head with each request."""

    client_id: str  # X-Request-Id, if it can be one; else ""
    authorization: str | None
    api_key: str | None
    key: str | None  # Idempotency-Key
    last_id: str  # Last-Event-ID
    passed_on: dict[str, str]  # to engines; not to be changed


FACTS = web.RequestKey("facts", HeadFacts)


def facts_of(headers: CIMultiDictProxy[str]) -> HeadFacts:
    """Those of the fields of a head."""
    given = headers.get("X-Request-Id", "")
    return HeadFacts(
        client_id=given if _CLIENT_ID.fullmatch(given) else "",
        authorization=headers.get("Authorization"),
        api_key=headers.get("X-Api-Key"),
        key=headers.get(KEY),
        last_id=headers.get("Last-Event-ID", ""),
        passed_on={name: ", ".join(headers.getall(name)) for name in _PASSED_ON if name in headers},
    )


def head_facts(request: web.Request) -> HeadFacts:
    """Those of a request, which are read once."""
    found: HeadFacts | None = request.get(FACTS)
    if found is None:
        found = request[FACTS] = facts_of(request.headers)
    return found
