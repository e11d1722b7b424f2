"""The store on Redis, for processes on several machines. Needs the extra `redis`.

Every call is one Lua script (redis_script.py), which the server runs as a whole.  Changes go into a stream with their
revision: a watcher reads what follows the last one that it has seen, and so misses nothing while it is disconnected.

What is acknowledged survives the death of the server only with `appendonly yes` and `appendfsync always`.  With other
settings a restart counts as a loss: revisions go on above all that were given out, watchers get a snapshot, and a key
with a lease is not created before the leases that were forgotten have ended.  One server: replicas lag, so that a
failover would lose what was acknowledged, too.

Calls have `MAX_CONNECTIONS - MAX_WAITING` connections, and further ones wait for one, in order, within their `CALL_S`.
Watchers that wait for a change have `MAX_WAITING` of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from pipeline.coordination.interface import (
    Change,
    Condition,
    CoordinationStore,
    Event,
    Item,
    Update,
    check_transaction,
    check_ttl,
)
from pipeline.coordination.redis_leases import OwnKeys, SeenLeases
from pipeline.coordination.redis_script import SCRIPT
from pipeline.errors import ConfigError, StarlingError, StorageUnavailable
from pipeline.extras import how_to_install

log = logging.getLogger("starling.coordination")

KEPT_EVENTS = 10_000
KEPT_BYTES = 64 << 20  # of events
CALL_S = 5.0  # until a call without an answer fails
CHECK_S = 0.25  # between two checks of the leases, and of a watcher that waits
RECONNECT_S = 0.2  # between two attempts to watch
MAX_LIVES = 8  # of the server, during one call
MAX_CONNECTIONS = 64
MAX_WAITING = 4  # of them, of watchers that wait for a change; a process has one watcher
_KEYS = ("meta", "items", "revisions", "names", "held", "leases", "events")
_LAST = (1 << 64) - 1  # number of an entry of the stream


class RedisStore(CoordinationStore):
    """The store of the server at `host:port`. Used in one event loop. `clock`: monotonic, s."""

    def __init__(
        self,
        host: str,
        port: int,
        namespace: str = "starling",
        *,
        username: str = "",
        password: str = "",
        clock: Callable[[], float] = time.monotonic,
        kept_events: int = KEPT_EVENTS,
    ) -> None:
        """Raises `ConfigError` when the extra is not installed."""
        try:
            from redis import asyncio as redis_asyncio
            from redis import exceptions
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ConfigError(
                f"the coordination store redis needs the extra `redis`: {how_to_install('redis')}"
            ) from None
        self.address = f"{host}:{port}"
        self._errors_of: Any = exceptions
        # The client must not repeat a transaction: it may have been applied.
        self._client: Any = redis_asyncio.Redis(
            host=host,
            port=port,
            username=username or None,
            password=password or None,
            # Its own bound of a call swallows cancellations on Python 3.11 (asyncio.wait_for): `_answer` has another.
            socket_timeout=None,
            socket_connect_timeout=CALL_S,
            socket_keepalive=True,
            max_connections=MAX_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._script: Any = self._client.register_script(SCRIPT)
        self._keys = [f"{{{namespace}}}:{name}" for name in _KEYS]  # in one slot, should there be a cluster
        self._clock = clock
        self._kept_events = kept_events
        self._run = self._era = b""  # as the server was known last
        self._is_durable = False
        self._since = clock()  # when this run and era were first seen
        self._revision = 0  # the greatest one that was seen
        self._seen = SeenLeases()
        self._own = OwnKeys()
        self._checked = -math.inf
        self._has_answered = False
        self._free = asyncio.Semaphore(MAX_CONNECTIONS - MAX_WAITING)  # connections; the client's pool would refuse
        self._free_to_wait = asyncio.Semaphore(MAX_WAITING)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.aclose()

    # ------------------------------------------------------------------ values

    async def get(self, key: str) -> Item | None:
        """The value of a key."""
        value, revision = await self._call("get", key)
        return Item(key, value, int(revision)) if value is not None else None

    async def scan(self, prefix: str) -> tuple[list[Item], int]:
        """All values below a prefix, and the revision."""
        (rows,), revision = await self._call_at("scan", prefix)
        return [Item(key.decode(), value, int(one)) for key, value, one in rows], revision

    async def transact(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> int | None:
        """Apply all changes or none."""
        check_transaction(conditions, changes)
        now = self._clock()
        arguments: list[Any] = [len(conditions)]
        for key, revision in conditions:
            arguments += (key, revision)
        arguments.append(len(changes))
        for key, value, lease in changes:
            is_own = self._own.holds(key, now)
            arguments += (key, int(value is not None), value or b"", lease, int(is_own))
        (done, *rest), revision = await self._call_at("transact", *arguments)
        if done == b"wait":
            raise StorageUnavailable(
                f"Redis at {self.address} has restarted without its last writes: leases that it has forgotten may last "
                f"for {int(rest[0]) / 1000:.1f} s; with `appendonly yes` and `appendfsync always` it forgets nothing"
            )
        if done == b"no":
            return None
        for key, _, lease in changes:
            self._own.wrote(key, lease)
        return revision

    # ------------------------------------------------------------------ leases

    async def grant(self, ttl_s: float) -> str:
        """A new lease."""
        check_ttl(ttl_s)
        lease, asked = secrets.token_hex(8), self._clock()
        (entry,) = await self._call("grant", lease, math.ceil(ttl_s * 1000))
        self._seen.see(lease.encode(), entry, self._clock())
        self._own.granted(lease, ttl_s, asked)
        return lease

    async def renew(self, lease: str) -> bool:
        """Prolong a lease."""
        asked = self._clock()
        (entry,) = await self._call("renew", lease)
        if entry is None:
            return False
        self._seen.see(lease.encode(), entry, self._clock())
        self._own.renewed(lease, asked)
        return True

    async def revoke(self, lease: str) -> None:
        """End a lease."""
        self._own.revoked(lease)
        await self._call("revoke", lease)
        self._seen.drop(lease.encode())

    # ------------------------------------------------------------------ watching

    async def watch(self, prefix: str, after: int = 0) -> AsyncIterator[Update]:
        """Updates without end. While the server is away, the watcher waits for it."""
        seen = after
        while True:
            try:
                (kind, rows), revision = await self._call_at("updates", prefix, seen)
                events = tuple(Event(key.decode(), value, int(one)) for key, value, one in rows)
                seen = revision
                if events or kind == b"snapshot":
                    yield Update(revision, events, kind == b"snapshot")
                await self._wait(seen)
            except StorageUnavailable:
                await asyncio.sleep(RECONNECT_S)

    async def _wait(self, seen: int) -> None:
        """Wait for a change after a revision, but not longer than `CHECK_S`."""
        after = {self._keys[-1]: f"{seen}-{_LAST}"}
        read = partial(self._client.xread, after, count=1, block=int(CHECK_S * 1000))
        await self._answer(read, self._free_to_wait)

    # ------------------------------------------------------------------ calls

    async def _call(self, operation: str, *arguments: Any) -> list[Any]:
        return (await self._call_at(operation, *arguments))[0]

    async def _call_at(self, operation: str, *arguments: Any) -> tuple[list[Any], int]:
        """Run the script; what the operation returns, and the store's revision."""
        for _ in range(MAX_LIVES):
            now, asked = self._clock(), self._seen.serial
            over = self._seen.over(now)
            wants_leases = now >= self._checked + CHECK_S
            sent = [self._run, self._era, int(self._is_durable), self._revision, int((now - self._since) * 1000)]
            sent += [self._kept_events, KEPT_BYTES, int(wants_leases), len(over)]
            for lease, entry in over:
                sent += (lease, entry)
            answer = await self._answer(
                partial(self._script, keys=self._keys, args=[*sent, operation, *arguments]), self._free
            )
            if answer[0] == b"life":
                await self._begin(answer[1], answer[2])
                continue
            now = self._clock()
            _, revision, leases, *result = answer
            for lease, _ in over:
                self._seen.drop(lease)
            self._has_answered = True
            if leases is not None:
                self._checked = now
                self._seen.see_all(zip(leases[::2], leases[1::2]), now, asked)
            self._revision = max(self._revision, int(revision))
            return result, int(revision)
        raise StorageUnavailable(f"Redis at {self.address} starts again and again, or is several servers")

    async def _begin(self, run: bytes, era: bytes) -> None:
        """The server has started anew, or has lost data: what was seen of leases counts no longer."""
        if run != self._run:
            self._is_durable = await self._look_at_settings()
        self._run, self._era, self._since = run, era or self._era, self._clock()
        self._seen.forget()
        self._checked = -math.inf

    async def _look_at_settings(self) -> bool:
        """Whether the server's data outlive it. Raises `ConfigError` if it removes keys by itself."""
        names = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
        found = await self._answer(partial(self._client.config_get, *names), self._free, if_refused={})
        policy = found.get("maxmemory-policy", "")
        if found.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
            raise self._refusal(
                f"Redis at {self.address} removes keys when its memory is full (maxmemory-policy {policy}): "
                "set noeviction"
            )
        is_durable = found.get("appendonly") == "yes" and found.get("appendfsync") == "always"
        if not is_durable:
            log.warning(
                "Redis may lose writes at a restart",
                extra={"address": self.address, "remedy": "appendonly yes, appendfsync always"},
            )
        return is_durable

    async def _answer(self, call: Callable[[], Awaitable[Any]], free: asyncio.Semaphore, if_refused: Any = None) -> Any:
        """The server's answer to a call. Raises `StorageUnavailable`, `ConfigError`.

        free: the connections of which the call takes one.
        if_refused: what is returned, unless it is None, when the server refuses the command.
        """
        known = self._errors_of
        try:
            async with asyncio.timeout(CALL_S) as bound, free:
                return await call()
        except (known.AuthenticationError, known.AuthorizationError) as error:
            raise self._refusal(f"Redis at {self.address}: {_line(error)}") from None
        except (known.RedisError, OSError) as error:
            if if_refused is not None and isinstance(error, known.ResponseError):
                return if_refused
            if isinstance(error, known.NoPermissionError):
                raise self._refusal(f"Redis at {self.address}: {_line(error)}") from None
            if "unauthenticated" in str(error):  # a long command before a password
                raise self._refusal(f"Redis at {self.address} wants a password: REDIS_PASSWORD") from None
            reason = f"no answer within {CALL_S:g} s" if bound.expired() else _line(error)
            raise StorageUnavailable(f"Redis at {self.address}: {reason}") from None

    def _refusal(self, message: str) -> StarlingError:
        """What a server's settings forbid is an error of the configuration at the start, and an absence later.

        A process that serves goes on without its store.
        """
        if not self._has_answered:
            return ConfigError(message, "fleet.store")
        log.error("Redis refuses what it allowed before", extra={"reason": message})
        return StorageUnavailable(message)


def _line(error: BaseException) -> str:
    """The first line of the client's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
