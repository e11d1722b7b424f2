"""Quotas: requests and tokens per minute for each tenant, as token buckets. Pure; the clock is injected.

A bucket holds one minute's worth: a burst may use all of it, then it refills evenly.  The cost of a request is
only certain at its end, so its prompt is charged when it starts and its output when it ends.  The level may
become negative; the next request then waits longer.  A prompt larger than one minute's worth is admitted when
the bucket is full, so that every request can be admitted eventually.  With a `LevelStore` the levels survive a
restart: buckets refill while the server is down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from pipeline.api.quota_file import Level, bucket_key
from pipeline.config.schema import RateLimitsConfig
from pipeline.errors import RateLimited

REQUESTS, TOKENS = "requests", "tokens"  # the units that are counted
MIN_MISSING = 1e-6  # less than this is a rounding error of the level


class Bucket:
    """A token bucket that holds `per_minute` and refills evenly. Its level may be negative."""

    __slots__ = ("_at", "_clock", "_level", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What can be taken now."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` can be taken, or until the bucket is full if `amount` is larger."""
        missing = min(amount, self.per_minute) - self.level
        return missing * 60 / self.per_minute if missing > MIN_MISSING else 0.0

    def take(self, amount: float) -> None:
        """Lower the level by `amount`, below zero if necessary."""
        self._level = self.level - amount

    @property
    def is_full(self) -> bool:
        """True when the bucket holds one minute's worth."""
        return self.level >= self.per_minute


class LevelStore(Protocol):
    """Levels that survive a restart: a `QuotaFile`, or the thread that writes it."""

    def level_of(self, key: bytes) -> Level | None:
        """The level that was stored last for the bucket `key`."""

    def put(self, key: bytes, level: Level) -> None:
        """Store the level of a bucket. Never raises."""


class Quotas:
    """The buckets of all tenants."""

    MAX_IDLE = 1024  # buckets kept; beyond that full ones are dropped: a new bucket is full, too

    def __init__(
        self,
        limits: RateLimitsConfig,
        clock: Callable[[], float],
        file: LevelStore | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is monotonic, `wall` is s since 1970. Without a file the levels are lost on a restart."""
        self._limits = limits
        self._clock = clock
        self._file = file
        self._wall = wall
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def take_request(self, tenant: str) -> None:
        """Charge one request. Raises `RateLimited` with the time to wait; then nothing is charged."""
        bucket = self._bucket(REQUESTS, tenant)
        if bucket is None:
            return
        wait = bucket.wait_s(1)
        if wait:
            raise RateLimited(
                f"the quota of {bucket.per_minute} requests per minute is used up; try again in {wait:.1f} s",
                retry_after_s=wait,
            )
        self._take(REQUESTS, tenant, bucket, 1)

    def take_prompt(self, tenant: str, tokens: int) -> None:
        """Charge a prompt. Raises `RateLimited` with the time to wait; then nothing is charged."""
        bucket = self._bucket(TOKENS, tenant)
        if bucket is None:
            return
        wait = bucket.wait_s(tokens)
        if wait:
            raise RateLimited(
                f"the prompt has {tokens} tokens and the quota of {bucket.per_minute} tokens per minute has "
                f"{max(0, int(bucket.level))} left; try again in {wait:.1f} s",
                retry_after_s=wait,
            )
        self._take(TOKENS, tenant, bucket, tokens)

    def charge_output(self, tenant: str, tokens: int) -> None:
        """Charge generated tokens; never fails."""
        bucket = self._bucket(TOKENS, tenant)
        if bucket is not None:
            self._take(TOKENS, tenant, bucket, tokens)

    def _take(self, kind: str, tenant: str, bucket: Bucket, amount: float) -> None:
        bucket.take(amount)
        if self._file is not None:
            self._file.put(bucket_key(kind, tenant), Level(bucket.per_minute, bucket.level, self._wall()))

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
        """Charge what was used up when the bucket was last stored, less what has refilled since."""
        known = self._file.level_of(bucket_key(kind, tenant)) if self._file is not None else None
        if known is None or not math.isfinite(known.level):
            return
        passed_s = max(0.0, self._wall() - known.at)  # a clock that was set back refills nothing
        used = known.per_minute - known.level - passed_s * known.per_minute / 60
        bucket.take(max(0.0, used))
