"""Who may ask, and how much: API keys, tenants, quotas. Pure; the clock is given.

A tenant's quotas are token buckets of one minute's worth: a burst may take all of it, then it refills
evenly.  What a request will cost is known only at its end, so its prompt is charged when it begins and
its output when it ends; a bucket may go below zero and is waited for.  A prompt larger than a minute's
worth is let in when the bucket is full, so nothing is refused for ever.  What was used up outlives the
process where there is a file for it (quota_file.py): time goes on while nobody serves.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from pipeline.config.schema import AuthConfig, RateLimitsConfig
from pipeline.errors import RateLimited, Unauthenticated
from stages.gateway.admission.quota_file import Level, QuotaFile, key_of

REQUESTS, TOKENS = "requests", "tokens"  # what is counted
ANYONE = "default"  # the tenant of all when there are no keys


class Caller(NamedTuple):
    tenant: str
    priority: int = 0
    is_admin: bool = False
    salt: str = ""  # of the tenant's cached pages

    def salted(self, own: str) -> str:
        """The salt of a request that gives `own`: with the tenant's before it, which no request can give,
        because no salt has a NUL in it."""
        return f"{self.salt}\0{own}" if self.salt else own


class Keys:
    """API keys by digest. A presented key is compared with every one, in constant time."""

    def __init__(self, auth: AuthConfig) -> None:
        self._keys = [
            (_digest(key.key), Caller(key.owner, key.priority, key.admin, key.cache_salt)) for key in auth.api_keys
        ]

    def caller(self, authorization: str | None) -> Caller:
        """Of an `Authorization` header. Raises `Unauthenticated`."""
        if not self._keys:
            return Caller(ANYONE)
        if not authorization:
            raise Unauthenticated("no API key: send the header Authorization: Bearer KEY")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("the Authorization header is not of the form: Bearer KEY")
        presented = _digest(key.strip())
        found: Caller | None = None
        for digest, caller in self._keys:
            if hmac.compare_digest(digest, presented):
                found = caller
        if found is None:
            raise Unauthenticated("the API key is not known; check the key, or ask who runs this server")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Bucket:
    """`per_minute` at most at once, refilled evenly. `level` may be negative."""

    __slots__ = ("_at", "_clock", "_level", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` can be taken (of more than a minute's worth: until it is full)."""
        missing = min(amount, self.per_minute) - self.level
        # Below what the arithmetic can tell apart, nothing is missing.
        return missing * 60 / self.per_minute if missing > 1e-6 else 0.0

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    @property
    def is_full(self) -> bool:
        return self.level >= self.per_minute


class Quotas:
    """Requests and tokens per minute, for each tenant."""

    MAX_IDLE = 1024  # tenants kept; full buckets beyond that are dropped, which changes nothing

    def __init__(
        self,
        limits: RateLimitsConfig,
        clock: Callable[[], float],
        kept: QuotaFile | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is monotonic, `wall` is s since 1970. Without a file nothing outlives the process."""
        self._limits = limits
        self._clock = clock
        self._kept = kept
        self._wall = wall
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def take_request(self, tenant: str) -> None:
        """Raises `RateLimited` with the time to wait; then nothing is taken."""
        bucket = self._bucket(REQUESTS, tenant)
        if bucket is None:
            return
        wait = bucket.wait_s(1)
        if wait:
            raise RateLimited(
                f"{bucket.per_minute} requests per minute are allowed and used up; try again in {wait:.1f} s",
                retry_after_s=wait,
            )
        self._take(REQUESTS, tenant, bucket, 1)

    def take_prompt(self, tenant: str, tokens: int) -> None:
        """Raises `RateLimited` with the time to wait; then nothing is taken."""
        bucket = self._bucket(TOKENS, tenant)
        if bucket is None:
            return
        wait = bucket.wait_s(tokens)
        if wait:
            raise RateLimited(
                f"{bucket.per_minute} tokens per minute are allowed, {max(0, int(bucket.level))} are left, "
                f"and the prompt has {tokens}; try again in {wait:.1f} s",
                retry_after_s=wait,
            )
        self._take(TOKENS, tenant, bucket, tokens)

    def charge_output(self, tenant: str, tokens: int) -> None:
        bucket = self._bucket(TOKENS, tenant)
        if bucket is not None:
            self._take(TOKENS, tenant, bucket, tokens)

    def _take(self, kind: str, tenant: str, bucket: Bucket, amount: float) -> None:
        bucket.take(amount)
        if self._kept is not None:
            self._kept.put(key_of(kind, tenant), Level(bucket.per_minute, bucket.level, self._wall()))

    def _bucket(self, kind: str, tenant: str) -> Bucket | None:
        if kind == REQUESTS:
            buckets, per_minute = self._requests, self._limits.requests_per_minute
        else:
            buckets, per_minute = self._tokens, self._limits.tokens_per_minute
        if not per_minute:
            return None
        bucket = buckets.get(tenant)
        if bucket is None:
            if len(buckets) >= self.MAX_IDLE:
                for name in [name for name, other in buckets.items() if other.is_full]:
                    del buckets[name]
            bucket = buckets[tenant] = Bucket(per_minute, self._clock)
            self._restore(kind, tenant, bucket)
        return bucket

    def _restore(self, kind: str, tenant: str, bucket: Bucket) -> None:
        """What had been used when it was last charged, less what time has given back since."""
        known = self._kept.levels.get(key_of(kind, tenant)) if self._kept is not None else None
        if known is None or not math.isfinite(known.level):
            return
        passed_s = max(0.0, self._wall() - known.at)  # a clock that was set back gives nothing back
        used = known.per_minute - known.level - passed_s * known.per_minute / 60
        bucket.take(max(0.0, used))
