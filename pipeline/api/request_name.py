"""The name that a client gives a request: `X-Starling-Request: req-HEX; created=S; seed=N; salt=TEXT`.

An orchestrator sends one request to several servers, one after the other, when the first of them dies, and its client
must receive one answer.  Everything that a server would draw is in the name: the id, the time that the answer shows,
and the seed of a request that gives none.  A salt separates the cached pages of tenants who share an API key.

Pure.  Without the header a server draws as before.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from pipeline.errors import InvalidRequest

HEADER = "X-Starling-Request"
MAX_CREATED = 1 << 33  # s since 1970
_NAME = re.compile(
    r"(req-[0-9a-f]{24})(?:; *created=([0-9]{1,10}))?(?:; *seed=([0-9]{1,20}))?(?:; *salt=([0-9A-Za-z]{1,64}))?"
)
_LIKE_TENANTS = re.compile(r" *[0-9a-f]{32} ")


class RequestName(NamedTuple):
    """What the header fixes."""

    id: str  # req- and 24 hexadecimal digits
    created: int = 0  # s since 1970; 0: now
    seed: int | None = None  # of a request that gives none
    salt: str = ""

    def salted(self, request_salt: str) -> str:
        """The cache salt of the request, which differs for different salts.

        None begins with 32 hexadecimal digits and a space unless they are a tenant's (page_owner.py).
        """
        if self.salt:
            return f"{self.salt} {request_salt}"
        return f" {request_salt}" if _LIKE_TENANTS.match(request_salt) else request_salt


def read_request_name(given: str | None) -> RequestName | None:
    """Read the header; None without one. Raises `InvalidRequest`."""
    if not given:
        return None
    match = _NAME.fullmatch(given)
    if match is None or int(match[2] or 0) > MAX_CREATED or int(match[3] or 0) >= 1 << 64:
        raise InvalidRequest(
            f"{HEADER} is {given[:120]!r}; expected req- and 24 hexadecimal digits, then at most, in this order, "
            "; created=SECONDS; seed=NUMBER; salt=LETTERS",
            HEADER,
        )
    return RequestName(match[1], int(match[2] or 0), int(match[3]) if match[3] else None, match[4] or "")


def new_request_name() -> RequestName:
    """A name that fixes the id alone."""
    return RequestName(f"req-{secrets.token_hex(12)}")
