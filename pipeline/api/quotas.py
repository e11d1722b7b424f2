"""Quotas: requests and tokens per minute, per day and in all. Pure; the clocks are injected.

    per minute   a token bucket that holds one minute's worth: a burst may use all of it, then it refills evenly
    per day      a count that starts again at 00:00 UTC
    total        a count that never starts again

A tenant has the limits of `rate_limits`.  A limit that an API key has of its own replaces the tenant's for requests
with this key, and has a counter of its own.

The cost of a request is only certain at its end, so its prompt is charged when it starts and its output when it ends.
The level of a bucket may become negative, and a count may exceed its limit by the output of the requests in flight.  A
prompt larger than one minute's worth is admitted when the bucket is full, so that every request can be admitted
eventually.  With a `LevelStore` all counters survive a restart: buckets refill while the server is down.  With a
`UseLog` several processes share the limits of a tenant or key.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from pipeline.api.key_file import KeyLimits
from pipeline.api.keys import NO_LIMITS
from pipeline.api.quota_file import Level, bucket_key
from pipeline.config.schema import RateLimitsConfig
from pipeline.errors import RateLimited

REQUESTS, TOKENS = "requests", "tokens"  # the units that are counted
MINUTE, DAY, TOTAL = "minute", "day", "total"
PERIODS = (MINUTE, DAY, TOTAL)
MIN_MISSING = 1e-6  # less than this is a rounding error of the level
MINUTE_S = 60.0  # in which an empty bucket refills
DAY_S = 86_400.0


class Counter(Protocol):
    """What the counters of all periods have. Amounts are requests or tokens."""

    limit: int

    @property
    def day(self) -> int:
        """The day that is counted, since 1970; 0 for other periods."""

    def begin_day(self, day: int) -> None:
        """Another process counts this day already: a daily counter that is behind starts again."""

    @property
    def remaining(self) -> float:
        """What can be taken now; negative if more has been taken."""

    @property
    def is_full(self) -> bool:
        """Whether nothing counts as used, so that a new counter is the same."""

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` can be taken; infinite if that time never comes."""

    def reset_s(self) -> float:
        """Seconds until nothing counts as used; infinite if that time never comes."""

    def take(self, amount: float) -> None:
        """Use `amount`, more than remains if necessary."""

    def stored(self) -> Level:
        """What a successor needs to continue."""

    def restore(self, level: Level) -> None:
        """Continue from what a predecessor has stored."""


class Bucket:
    """A token bucket that holds `limit` and refills evenly in a minute. Its level may be negative."""

    __slots__ = ("_at", "_clock", "_level", "_wall", "limit")

    def __init__(self, limit: int, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self.limit = limit
        self._clock = clock
        self._wall = wall
        self._level = float(limit)
        self._at = clock()

    @property
    def day(self) -> int:
        """None is counted."""
        return 0

    def begin_day(self, day: int) -> None:
        """Nothing changes."""

    @property
    def remaining(self) -> float:
        """What can be taken now."""
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._level

    @property
    def is_full(self) -> bool:
        """True when the bucket holds one minute's worth."""
        return self.remaining >= self.limit

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` can be taken, or until the bucket is full if `amount` is larger."""
        missing = min(amount, self.limit) - self.remaining
        return missing * MINUTE_S / self.limit if missing > MIN_MISSING else 0.0

    def reset_s(self) -> float:
        """Return the seconds until the bucket is full."""
        return max(0.0, (self.limit - self.remaining) * MINUTE_S / self.limit)

    def take(self, amount: float) -> None:
        """Lower the level by `amount`, below zero if necessary."""
        self._level = self.remaining - amount

    def stored(self) -> Level:
        """The level and its time."""
        return Level(self.limit, self.remaining, self._wall())

    def restore(self, level: Level) -> None:
        """Charge what was used up when the bucket was last stored, less what has refilled since."""
        passed_s = max(0.0, self._wall() - level.at)  # a clock that was set back refills nothing
        self.take(max(0.0, level.per_minute - level.level - passed_s * level.per_minute / MINUTE_S))


class Count:
    """What was used of `limit`, in a day or in all."""

    __slots__ = ("_day", "_is_daily", "_used", "_wall", "limit")

    def __init__(self, limit: int, is_daily: bool, wall: Callable[[], float]) -> None:
        self.limit = limit
        self._is_daily = is_daily
        self._wall = wall
        self._used = 0.0
        self._day = int(wall() // DAY_S)

    @property
    def day(self) -> int:
        """The day that is counted."""
        if not self._is_daily:
            return 0
        if (day := int(self._wall() // DAY_S)) > self._day:  # a clock that was set back gives nothing
            self._day, self._used = day, 0.0
        return self._day

    def begin_day(self, day: int) -> None:
        """Start again if the day is a later one."""
        if self._is_daily and day > self.day:
            self._day, self._used = day, 0.0

    @property
    def remaining(self) -> float:
        """What can be taken now."""
        self.day  # noqa: B018  (yesterday's use is forgotten)
        return self.limit - self._used

    @property
    def is_full(self) -> bool:
        """True when nothing has been used."""
        return self.remaining >= self.limit

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` can be taken: 0, those to the next day, or infinity."""
        if amount <= self.remaining:
            return 0.0
        return self._left_s() if self._is_daily and amount <= self.limit else math.inf

    def reset_s(self) -> float:
        """Return the seconds to the next day, or infinity."""
        if self.is_full:
            return 0.0
        return self._left_s() if self._is_daily else math.inf

    def _left_s(self) -> float:
        return (self._day + 1) * DAY_S - self._wall()

    def take(self, amount: float) -> None:
        """Count `amount`."""
        self._used = self.limit - self.remaining + amount

    def stored(self) -> Level:
        """The used amount and its time."""
        return Level(self.limit, self.limit - self.remaining, self._wall())

    def restore(self, level: Level) -> None:
        """Continue with the used amount, unless it is of another day."""
        if not self._is_daily or level.at // DAY_S >= self._day:
            self._used = max(0.0, level.level)


class LevelStore(Protocol):
    """Levels that survive a restart: a `QuotaFile`, or the thread that writes it."""

    def level_of(self, key: bytes) -> Level | None:
        """The level that was stored last for the bucket `key`."""

    def put(self, key: bytes, level: Level) -> None:
        """Store the level of a bucket. Never raises."""


Name = tuple[str, str, str]  # of a counter: unit, period, and the tenant or ":KEY_ID"


class UseLog(Protocol):
    """What several processes use of the same limits."""

    def restore(self, name: Name, counter: Counter) -> None:
        """A new counter: take from it what is known to be used. From now on the log changes it, too."""

    def taken(self, name: Name, counter: Counter, amount: float) -> None:
        """This process has taken `amount` from it."""


class Quotas:
    """The counters of all tenants and keys. A caller is a tenant and, of a key of the key file, the key's id."""

    MAX_IDLE = 1024  # counters held; beyond that full ones are dropped, because a new one is full, too

    def __init__(
        self,
        limits: RateLimitsConfig,
        clock: Callable[[], float],
        file: LevelStore | None = None,
        wall: Callable[[], float] = time.time,
        limits_of: Callable[[str], KeyLimits] = lambda key_id: NO_LIMITS,
        log: UseLog | None = None,
    ) -> None:
        """`clock` is monotonic, `wall` is s since 1970. Without a file the levels are lost on a restart.

        `limits_of` returns the limits of the key with that id. `log`: shares the limits with other processes.
        """
        self._limits = {
            (REQUESTS, MINUTE): limits.requests_per_minute,
            (REQUESTS, DAY): limits.requests_per_day,
            (TOKENS, MINUTE): limits.tokens_per_minute,
            (TOKENS, DAY): limits.tokens_per_day,
        }
        self._has_limits = any(self._limits.values())
        self._clock = clock
        self._file = file
        self._wall = wall
        self._limits_of = limits_of
        self._log = log
        self._counters: dict[Name, Counter] = {}

    def apply_to(self, key_id: str = "") -> bool:
        """Whether there may be a limit for requests with this key, or without one."""
        return bool(key_id) or self._has_limits

    def take_request(self, tenant: str, key_id: str = "") -> None:
        """Charge one request. Raises `RateLimited` with the time to wait; then nothing is charged."""
        found = self.counters(REQUESTS, tenant, key_id)
        for (_, period, _), counter in found:
            if wait := counter.wait_s(1):
                raise _refusal(f"the quota of {counter.limit} requests {_PER[period]} is used up", wait)
        self._take(found, 1)

    def take_prompt(self, tenant: str, tokens: int, key_id: str = "") -> None:
        """Charge a prompt. Raises `RateLimited` with the time to wait; then nothing is charged."""
        found = self.counters(TOKENS, tenant, key_id)
        for (_, period, _), counter in found:
            if wait := counter.wait_s(tokens):
                raise _refusal(
                    f"the prompt has {tokens} tokens and the quota of {counter.limit} tokens {_PER[period]} has "
                    f"{max(0, int(counter.remaining))} left",
                    wait,
                )
        self._take(found, tokens)

    def charge_output(self, tenant: str, tokens: int, key_id: str = "") -> None:
        """Charge generated tokens; never fails."""
        if tokens:
            self._take(self.counters(TOKENS, tenant, key_id), tokens)

    def headers(self, tenant: str, key_id: str = "") -> dict[str, str]:
        """Return `x-ratelimit-limit-UNIT`, `-remaining-UNIT` and `-reset-UNIT` of the limits that are nearest.

        Of several limits of a unit this is the one with the least left.  A total is never reset.
        """
        headers = {}
        for unit in (REQUESTS, TOKENS):
            counters = [counter for _, counter in self.counters(unit, tenant, key_id)]
            if not counters:
                continue
            nearest = min(counters, key=lambda counter: counter.remaining)
            headers[f"x-ratelimit-limit-{unit}"] = str(nearest.limit)
            headers[f"x-ratelimit-remaining-{unit}"] = str(max(0, int(nearest.remaining)))
            if math.isfinite(reset := nearest.reset_s()):
                headers[f"x-ratelimit-reset-{unit}"] = duration(reset)
        return headers

    def counters(self, unit: str, tenant: str, key_id: str = "") -> list[tuple[Name, Counter]]:
        """The counters from which a request of the caller is taken."""
        return list(self._of(unit, tenant, key_id)) if self.apply_to(key_id) else []

    def _take(self, found: list[tuple[Name, Counter]], amount: float) -> None:
        for name, counter in found:
            counter.take(amount)
            if self._file is not None:
                self._file.put(_bucket_key(name), counter.stored())
            if self._log is not None:
                self._log.taken(name, counter, amount)

    def _of(self, unit: str, tenant: str, key_id: str) -> Iterator[tuple[Name, Counter]]:
        """The counters that apply, by period."""
        own = self._limits_of(key_id) if key_id else NO_LIMITS
        for period in PERIODS:
            limit = getattr(own, _FIELDS[unit, period])
            whose = tenant
            if limit is not None:
                whose = f":{key_id}"  # no tenant has a colon
            else:
                limit = self._limits.get((unit, period), 0)
            if limit:
                name = (unit, period, whose)
                yield name, self._counter(name, limit)

    def _counter(self, name: Name, limit: int) -> Counter:
        counter = self._counters.get(name)
        if counter is not None and counter.limit == limit:
            return counter
        if len(self._counters) >= self.MAX_IDLE:
            for full in [other for other, one in self._counters.items() if one.is_full]:
                del self._counters[full]
        period = name[1]
        if period == MINUTE:
            counter = Bucket(limit, self._clock, self._wall)
        else:
            counter = Count(limit, period == DAY, self._wall)
        known = self._file.level_of(_bucket_key(name)) if self._file is not None else None
        if known is not None and math.isfinite(known.level):
            counter.restore(known)
        if self._log is not None:
            self._log.restore(name, counter)
        self._counters[name] = counter
        return counter


_FIELDS = {
    (unit, period): f"{unit}_total" if period == TOTAL else f"{unit}_per_{period}"
    for unit in (REQUESTS, TOKENS)
    for period in PERIODS
}
_PER = {MINUTE: "per minute", DAY: "per day", TOTAL: "in total"}


def duration(seconds: float) -> str:
    """Return a time as clients of OpenAI's API read it: 20ms, 8.64s, 6m0s, 23h59m1s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _refusal(reason: str, wait_s: float) -> RateLimited:
    if math.isinf(wait_s):
        return RateLimited(f"{reason}; ask the server's operator for more", code="QUOTA_EXHAUSTED")
    return RateLimited(f"{reason}; try again in {wait_s:.1f} s", retry_after_s=wait_s)


def _bucket_key(name: Name) -> bytes:
    unit, period, whose = name
    return bucket_key(unit if period == MINUTE else f"{unit}/{period}", whose)
