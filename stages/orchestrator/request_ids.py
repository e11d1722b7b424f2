"""Ids of requests that carry what every orchestrator of the fleet must derive alike.

    req- 8 digits   s since 1970 at which it was created, or of a keyed request a part of the key's hash
         10 digits  random, or of a keyed request another part
         6 digits   HMAC of the tenant and the digits before: only its tenant may read the request

From the id follow the seed of a request that gives none and, unless it has a key, the time that its answer shows: a
client can repeat a request at another orchestrator, and continue where its last event left off.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipeline.errors import InvalidRequest, NotFound

DRAWN_BYTES = 1000  # of random digits at once
MAX_PREPARED = 256  # tenants
_ID = re.compile(r"req-([0-9a-f]{18})([0-9a-f]{6})")
_LAST_ID = re.compile(r"(req-[0-9a-f]{24}):[0-9a-f.\-]{1,4096}")


class RandomDigits:
    """Random hexadecimal digits. Many are drawn at once: a call of the kernel takes longer than all else of an id."""

    def __init__(self) -> None:
        self._digits = ""
        self._at = 0

    def __call__(self, n_bytes: int) -> str:
        """The digits of so many bytes."""
        end = self._at + 2 * n_bytes
        if end > len(self._digits):
            self._digits, self._at, end = secrets.token_hex(max(DRAWN_BYTES, n_bytes)), 0, 2 * n_bytes
        digits, self._at = self._digits[self._at : end], end
        return digits


class _Prepared(NamedTuple):
    """An id that no request has had."""

    second: int  # since 1970
    request_id: str
    seed: int


class RequestIds:
    """`secret`: of the fleet. `wall`: s since 1970. `draw(n)`: random hexadecimal digits of n bytes."""

    def __init__(self, secret: str, wall: Callable[[], float], draw: Callable[[int], str] | None = None) -> None:
        self._keyed = hmac.new(secret.encode(), digestmod="sha256")  # copied for each digest: the key is hashed once
        self._wall = wall
        self._draw = draw or RandomDigits()
        self._prepared: dict[str, _Prepared] = {}  # by tenant
        self._last = _Prepared(0, "", 0)  # the last one that was used

    def new(self, tenant: str) -> str:
        """The id of a new request."""
        prepared, second = self._prepared.pop(tenant, None), int(self._wall())
        if prepared is not None and prepared.second == second:
            self._last = prepared
            return prepared.request_id
        return self._new(tenant, second)

    def prepare(self, tenant: str) -> None:
        """Make the id, and the seed, of the next request now: it uses them if it comes in the same second."""
        if len(self._prepared) >= MAX_PREPARED:
            self._prepared.clear()
        second = int(self._wall())
        request_id = self._new(tenant, second)
        self._prepared[tenant] = _Prepared(second, request_id, self.seed(request_id))

    def _new(self, tenant: str, second: int) -> str:
        return self._sealed(f"{second & 0xFFFFFFFF:08x}{self._draw(5)}", tenant)

    def of_key(self, tenant: str, key: str) -> str:
        """The id of the request that the tenant sends with this `Idempotency-Key`."""
        return self._sealed(self._digest("key", tenant, key)[:18], tenant)

    def check(self, request_id: str, tenant: str) -> str:
        """The id, if it is one of the tenant's. Raises `NotFound`."""
        match = _ID.fullmatch(request_id)
        if match is None or not hmac.compare_digest(self._sealed(match[1], tenant), request_id):
            raise NotFound(
                f"there is no request {request_id[:80]!r}; answers of ended requests are stored for a short time only"
            )
        return request_id

    def seed(self, request_id: str) -> int:
        """The seed of a request that gives none, 64 bits."""
        return int(self._digest("seed", request_id)[:16], 16)

    def name(self, request_id: str, *, is_keyed: bool, salt: str) -> str:
        """The header `X-Starling-Request` with which engines compute equal bytes.

        salt: of the tenant's cached pages; "": shared.
        """
        created = int(self._wall()) if is_keyed else int(request_id[4:12], 16)
        seed = self._last.seed if self._last.request_id == request_id else self.seed(request_id)
        name = f"{request_id}; created={created}; seed={seed}"
        return f"{name}; salt={self.salt(salt)}" if salt else name

    def salt(self, salt: str) -> str:
        """What engines get of a tenant's salt (pipeline/api/page_owner.py); "" for ""."""
        return self._digest("salt", salt)[:32] if salt else ""

    def tenants(self, salts: Mapping[str, str]) -> dict[str, str]:
        """The names of tenants by what engines get of their salts, if one tenant alone has it. `salts`: by name.

        A tenant without a salt is not among them: agents of older releases give no owner's salt.
        """
        sent = [(self.salt(salt), name) for name, salt in salts.items() if salt]
        count = Counter(salt for salt, _ in sent)
        return {salt: name for salt, name in sent if count[salt] == 1}

    def _sealed(self, digits: str, tenant: str) -> str:
        return f"req-{digits}{self._digest('tenant', tenant, digits)[:6]}"

    def _digest(self, *parts: str) -> str:
        keyed = self._keyed.copy()
        keyed.update("\0".join(parts).encode("utf-8", "surrogatepass"))
        return keyed.hexdigest()


def request_of(last_id: str) -> str:
    """The request of a `Last-Event-ID`. Raises `InvalidRequest`."""
    match = _LAST_ID.fullmatch(last_id)
    if match is None:
        raise InvalidRequest(
            f"Last-Event-ID is {last_id[:80]!r}; send the id of the last event as it was received, like req-0a1b2c:17",
            "Last-Event-ID",
        )
    return match[1]
