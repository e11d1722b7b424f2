"""The store on etcd, for processes on several machines. Needs the extra `etcd` (aetcd, of which the stubs are used).

Keys lie below a namespace.  etcd has what the interface asks for: transactions compare `mod_revision`, leases delete
their keys, watches resume at a revision.  Its leases have whole seconds: `ttl_s` is rounded up, and a holder counts its
own.  A watch whose revision is compacted, or that has lost its stream, lists and watches again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
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
from pipeline.errors import ConfigError, StorageUnavailable
from pipeline.extras import how_to_install

CALL_S = 5.0  # until a call without an answer fails
RECONNECT_S = 0.2  # between two attempts to watch
_OPTIONS = (
    ("grpc.max_reconnect_backoff_ms", 1000),  # by default it grows to two minutes
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.keepalive_time_ms", 10_000),  # a silent host is noticed
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 << 20),  # a scan is one answer; by default 4 MiB
)


class EtcdStore(CoordinationStore):
    """The store of the server at `host:port`. Used in one event loop."""

    def __init__(self, host: str, port: int, namespace: str = "starling/") -> None:
        """Raises `ConfigError` when the extra is not installed."""
        try:
            from aetcd import rpc
        except ImportError:
            raise ConfigError(f"the coordination store etcd needs the extra `etcd`: {how_to_install('etcd')}") from None
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._namespace = namespace
        self._rpc: Any = rpc
        self._channel: Any = None

    def _stub(self, kind: str) -> Any:
        """A stub of a service, on the one channel, which connects by itself."""
        if self._channel is None:
            self._channel = self._rpc.insecure_channel(self.address, options=_OPTIONS)
        return getattr(self._rpc, kind)(self._channel)

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def get(self, key: str) -> Item | None:
        """The value of a key."""
        found = await self._call(self._stub("KVStub").Range(self._rpc.RangeRequest(key=self._key(key)), timeout=CALL_S))
        return self._item(found.kvs[0]) if found.kvs else None

    async def scan(self, prefix: str) -> tuple[list[Item], int]:
        """All values below a prefix, and the revision."""
        key = self._key(prefix)
        request = self._rpc.RangeRequest(key=key, range_end=_range_end(key))
        found = await self._call(self._stub("KVStub").Range(request, timeout=CALL_S))
        return sorted(self._item(one) for one in found.kvs), found.header.revision

    async def transact(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> int | None:
        """Apply all changes or none."""
        check_transaction(conditions, changes)
        rpc = self._rpc
        compare = [
            rpc.Compare(
                result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=self._key(one.key), mod_revision=one.revision
            )
            for one in conditions
        ]
        request = rpc.TxnRequest(compare=compare, success=[self._operation(change) for change in changes])
        try:
            done = await self._call(self._stub("KVStub").Txn(request, timeout=CALL_S))
        except LookupError:  # a lease has ended
            return None
        return done.header.revision if done.succeeded else None

    async def grant(self, ttl_s: float) -> str:
        """A new lease."""
        check_ttl(ttl_s)
        request = self._rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        return f"{(await self._call(self._stub('LeaseStub').LeaseGrant(request, timeout=CALL_S))).ID:x}"

    async def renew(self, lease: str) -> bool:
        """Prolong a lease."""
        request = self._rpc.LeaseKeepAliveRequest(ID=int(lease, 16))
        stream = self._stub("LeaseStub").LeaseKeepAlive(iter([request]), timeout=CALL_S)
        try:
            answer = await self._call(stream.read())
            return bool(getattr(answer, "TTL", 0) > 0)
        finally:
            stream.cancel()

    async def revoke(self, lease: str) -> None:
        """End a lease."""
        request = self._rpc.LeaseRevokeRequest(ID=int(lease, 16))
        with contextlib.suppress(LookupError):
            await self._call(self._stub("LeaseStub").LeaseRevoke(request, timeout=CALL_S))

    async def watch(self, prefix: str, after: int = 0) -> AsyncIterator[Update]:
        """Updates without end. While the server is away, the watcher waits for it."""
        seen = after or None
        while True:
            try:
                items, revision = await self.scan(prefix)
                if seen is None or seen > revision:
                    seen = revision
                    yield Update(seen, tuple(Event(*item) for item in items), True)
                async for update in self._stream(prefix, seen + 1):
                    if update is None:  # compacted
                        seen = None
                        break
                    seen = update.revision
                    yield update
            except StorageUnavailable:
                pass
            if seen is not None:
                await asyncio.sleep(RECONNECT_S)

    async def _stream(self, prefix: str, begin: int) -> AsyncIterator[Update | None]:
        """Updates from revision `begin` until the stream ends; None if that revision is compacted."""
        key = self._key(prefix)
        create = self._rpc.WatchCreateRequest(key=key, range_end=_range_end(key), start_revision=begin)
        stream = self._stub("WatchStub").Watch()
        try:
            await self._call(stream.write(self._rpc.WatchRequest(create_request=create)))
            while True:
                answer = await self._call(stream.read())
                if not isinstance(answer, self._rpc.WatchResponse):  # the end of the stream
                    return
                if answer.compact_revision or answer.canceled:
                    yield None
                    return
                events = tuple(self._event(event) for event in answer.events)
                if events:
                    yield Update(events[-1].revision, events, False)
        finally:
            stream.cancel()

    def _key(self, key: str) -> bytes:
        return (self._namespace + key).encode()

    def _name(self, key: bytes) -> str:
        return key.decode().removeprefix(self._namespace)

    def _item(self, found: Any) -> Item:
        return Item(self._name(found.key), found.value, found.mod_revision)

    def _event(self, event: Any) -> Event:
        is_deletion = event.type == event.DELETE
        return Event(self._name(event.kv.key), None if is_deletion else event.kv.value, event.kv.mod_revision)

    def _operation(self, change: Change) -> Any:
        rpc = self._rpc
        if change.value is None:
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._key(change.key)))
        lease = int(change.lease, 16) if change.lease else 0
        put = rpc.PutRequest(key=self._key(change.key), value=change.value, lease=lease)
        return rpc.RequestOp(request_put=put)

    async def _call(self, call: Awaitable[Any]) -> Any:
        with self._errors():
            return await call

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate gRPC's errors. An object that does not exist is a `LookupError`."""
        codes = self._rpc.StatusCode
        try:
            yield
        except self._rpc.AioRpcError as error:
            what = f"etcd at {self.address}: {(error.details() or error.code().name)[:300]}"
            if error.code() == codes.NOT_FOUND:
                raise LookupError(what) from None
            if error.code() in (codes.UNAUTHENTICATED, codes.PERMISSION_DENIED):
                raise ConfigError(what) from None
            raise StorageUnavailable(what) from None
        except self._rpc.BaseError as error:  # the channel was closed meanwhile
            raise StorageUnavailable(f"etcd at {self.address}: {error}") from None


def _range_end(key: bytes) -> bytes:
    """The end of the range of all keys that begin with `key`: its last byte plus one. Keys are ASCII."""
    return key[:-1] + bytes([key[-1] + 1])
