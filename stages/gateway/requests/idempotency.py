"""Idempotency keys: the repetition of a request attaches to the request that the first attempt has started.

    claim      a request with a key has arrived: its key is free (reserve it), or names an earlier request (attach)
    run        the request is admitted: the key names it, also on the gateway's successor (`RequestSpec` has the key)
    keep       it was answered: the key names its answer for `ttl_s`
    release    it was refused, failed or was cancelled: the next attempt is a new request

A key belongs to a tenant and to the bytes of one body. Keys and the answers that are stored for them are bounded in
bytes, of each tenant and in all: the keys of the oldest answers are forgotten first, those of running requests never.
The clock is injected; `on_drop(request_id)` is called for each answer that need not be stored any longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import takewhile

from pipeline.api.idempotency_key import HEADER, other_body
from pipeline.errors import Overloaded
from stages.gateway.requests.spec import RequestSpec

KEY_BYTES = 512  # estimated size of a key in the table, beside its answer


class Claim:
    """A key of one tenant, and the request that it names: "" until that has been admitted."""

    def __init__(self, tenant: str, key: str, digest: bytes) -> None:
        self.tenant = tenant
        self.key = key
        self.digest = digest  # SHA-256 of endpoint and body
        self.request_id = ""
        self.size = KEY_BYTES  # of the key and of the answer stored for it
        self.until = float("inf")  # when the answer expires, s of the clock
        self.settled = asyncio.Event()  # it names a request, or has been released


class IdempotencyKeys:
    """One per gateway. `clock` is monotonic, in s."""

    def __init__(self, clock: Callable[[], float], ttl_s: float, tenant_bytes: int, max_bytes: int) -> None:
        self.ttl_s = ttl_s
        self.bytes = 0
        self.attached = 0  # repetitions that were given the request of an earlier attempt
        self.evicted = 0  # keys that were forgotten before their time, for a bound
        self.on_drop: Callable[[str], None] = lambda request_id: None
        self._clock = clock
        self._tenant_bytes = tenant_bytes
        self._max_bytes = max_bytes
        self._claims: dict[tuple[str, str], Claim] = {}
        self._answered: defaultdict[str, dict[str, Claim]] = defaultdict(dict)  # by tenant and key, in order of `until`
        self._of_tenant: Counter[str] = Counter()  # bytes

    def __len__(self) -> int:
        return len(self._claims)

    def holds(self, tenant: str, key: str) -> bool:
        """Does the key name a request, or one in admission?"""
        return (tenant, key) in self._claims

    async def claim(self, tenant: str, key: str, digest: bytes) -> tuple[Claim, bool]:
        """Return the key's claim, and whether it is new: then `release` it unless the request is admitted.

        Waits while another attempt is being admitted. Raises `Conflict` if the key was sent with another body, and
        `Overloaded` if the tenant's keys of running requests reach their bound.
        """
        while (held := self._claims.get((tenant, key))) is not None:
            if held.digest != digest:
                raise other_body(key)
            if held.request_id:
                self.attached += 1
                return held, False
            await held.settled.wait()
        new = Claim(tenant, key, digest)
        if not self._make_room(tenant, new.size):
            raise Overloaded(
                f"the {HEADER}s of your running requests take {self._of_tenant[tenant]} of {self._tenant_bytes} bytes "
                f"(server.idempotency_tenant_mb), and all {self.bytes} of {self._max_bytes} (server.idempotency_mb); "
                f"wait until one ends, or leave the header out",
                retry_after_s=1.0,
            )
        self._add(new)
        return new, True

    def release(self, claim: Claim) -> None:
        """The request was not admitted: free its key. Does nothing if the key names a request."""
        if not claim.request_id:
            self._remove(claim)

    # ---------------------------------------------------------------- the life of a request

    def run(self, spec: RequestSpec) -> None:
        """The request of a key has been admitted, or was found in the journal: it takes room in any case."""
        if not spec.idempotency_key:
            return
        claim = self._claims.get((spec.tenant, spec.idempotency_key))
        if claim is None:
            claim = Claim(spec.tenant, spec.idempotency_key, spec.body_digest)
            self._add(claim)
        elif claim.request_id not in ("", spec.id):
            return
        claim.request_id = spec.id
        claim.settled.set()

    def run_again(self, spec: RequestSpec) -> None:
        """The stored answer of a key is generated again: it does not expire meanwhile."""
        claim = self._of(spec)
        if claim is not None:
            self._take_out(claim)

    def keep(self, spec: RequestSpec, size: int, age_s: float = 0.0) -> bool:
        """The request was answered `age_s` ago: keep its key. `size`: bytes of the stored answer.

        False: it has no key, its time is over, or it is larger than a bound. Its key is then free.
        """
        claim = self._of(spec)
        if claim is None:
            return False
        self._remove(claim)
        claim.size = KEY_BYTES + size
        age_s = max(0.0, age_s)  # the wall clock may have been set back
        if age_s >= self.ttl_s or not self._make_room(claim.tenant, claim.size):
            return False
        claim.until = self._clock() + self.ttl_s - age_s
        self._add(claim)
        self._put_in(claim)
        return True

    def forget(self, spec: RequestSpec) -> None:
        """The request failed or was cancelled: its key is free."""
        claim = self._of(spec)
        if claim is not None:
            self._remove(claim)

    def keeps(self, spec: RequestSpec) -> bool:
        """Does the request's key name it?"""
        return self._of(spec) is not None

    def expire(self) -> None:
        """Forget answers that are older than `ttl_s`."""
        now = self._clock()
        for answered in list(self._answered.values()):
            while answered and (oldest := next(iter(answered.values()))).until <= now:
                self._drop(oldest)

    # ---------------------------------------------------------------- bounds

    def _make_room(self, tenant: str, size: int) -> bool:
        """Forget the oldest answers, of the tenant and then of the largest tenants, until `size` more bytes fit."""
        if size > min(self._tenant_bytes, self._max_bytes):
            return False
        while self._of_tenant[tenant] + size > self._tenant_bytes:
            if not self._evict(tenant):
                return False
        while self.bytes + size > self._max_bytes:
            holders = [name for name, answered in self._answered.items() if answered]
            if not holders or not self._evict(max(holders, key=self._of_tenant.__getitem__)):
                return False
        return True

    def _evict(self, tenant: str) -> bool:
        answered = self._answered.get(tenant)
        if not answered:
            return False
        self._drop(next(iter(answered.values())))
        self.evicted += 1
        return True

    def _of(self, spec: RequestSpec) -> Claim | None:
        """The claim that names this request."""
        claim = self._claims.get((spec.tenant, spec.idempotency_key)) if spec.idempotency_key else None
        return claim if claim is not None and claim.request_id == spec.id else None

    def _add(self, claim: Claim) -> None:
        self._claims[claim.tenant, claim.key] = claim
        self._of_tenant[claim.tenant] += claim.size
        self.bytes += claim.size

    def _drop(self, claim: Claim) -> None:
        self._remove(claim)
        self.on_drop(claim.request_id)

    def _remove(self, claim: Claim) -> None:
        del self._claims[claim.tenant, claim.key]
        self._take_out(claim)
        self._of_tenant[claim.tenant] -= claim.size
        if not self._of_tenant[claim.tenant]:
            del self._of_tenant[claim.tenant]
        self.bytes -= claim.size
        claim.settled.set()

    def _put_in(self, claim: Claim) -> None:
        """Put a claim among those that are answered, before those that expire later than it."""
        answered = self._answered[claim.tenant]
        later = list(takewhile(lambda other: other.until > claim.until, reversed(answered.values())))
        answered[claim.key] = claim
        for other in reversed(later):
            answered[other.key] = answered.pop(other.key)

    def _take_out(self, claim: Claim) -> None:
        """Take a claim out of those that are answered. No table keeps a tenant without claims."""
        answered = self._answered.get(claim.tenant, {})
        answered.pop(claim.key, None)
        if not answered:
            self._answered.pop(claim.tenant, None)
