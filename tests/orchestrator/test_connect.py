"""The sockets of the client of engines: of the addresses of a host, the first one that answers is used."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

import pytest

from stages.orchestrator import connecting
from stages.orchestrator.connecting import NEXT_S, connect
from stages.orchestrator.engine_connection import Connection
from stages.orchestrator.http_client import Factory

WAIT_S = 300.0
ADDRESSES = [("fe80::1", 80, 0, socket.if_nametoindex("lo")), ("10.0.0.1", 80), ("10.0.0.2", 80)]
NAMES = ["fe80::1%lo", "10.0.0.1", "10.0.0.2"]


class Transport(asyncio.Transport):
    """Of a connection without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class Network:
    """What answers: each address when its `outcome` is set."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.cancelled: list[str] = []
        self.transports: dict[str, Transport] = {}
        self.connections: dict[str, Connection] = {}
        self.waits: list[float | None] = []
        self._changed = asyncio.Condition()
        self._outcomes: dict[str, asyncio.Future[bool]] = {}

    def outcome(self, address: str) -> asyncio.Future[bool]:
        return self._outcomes.setdefault(address, asyncio.get_running_loop().create_future())

    async def resolve(self, host: str, port: int, **options: int) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", one) for one in ADDRESSES]

    async def create(
        self, factory: Factory, address: str, port: int, context: ssl.SSLContext | None, name: str | None
    ) -> Connection:
        async with self._changed:
            self.tried.append(address)
            self._changed.notify_all()
        try:
            await self.outcome(address)
        except asyncio.CancelledError:
            self.cancelled.append(address)
            raise
        self.transports[address], self.connections[address] = Transport(), factory()
        self.connections[address].connection_made(self.transports[address])
        return self.connections[address]

    async def has_tried(self, count: int) -> None:
        async with self._changed, asyncio.timeout(WAIT_S):
            await self._changed.wait_for(lambda: len(self.tried) >= count)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Network]:
    """Makes one in the test's event loop."""

    def make() -> Network:
        network, loop, wait = Network(), asyncio.get_running_loop(), asyncio.wait

        async def waiting(tasks: list[asyncio.Task[Connection]], timeout: float | None, return_when: str) -> object:
            network.waits.append(timeout)
            return await wait(tasks, timeout=timeout, return_when=return_when)

        monkeypatch.setattr(loop, "getaddrinfo", network.resolve)
        monkeypatch.setattr(asyncio, "wait", waiting)
        return network

    return make


def _connection() -> Connection:
    return Connection(lambda connection: None, lambda connection: None)


async def test_an_address_that_answers_late_is_not_given_up(network: Callable[[], Network]) -> None:
    """The others never answer."""
    made = network()
    task = asyncio.ensure_future(connect(made.create, _connection, "engine", 80, None))
    await made.has_tried(3)
    assert made.tried == NAMES and made.waits[:2] == [NEXT_S, NEXT_S]
    made.outcome(NAMES[0]).set_result(True)
    assert await task is made.connections[NAMES[0]]
    assert sorted(made.cancelled) == sorted(NAMES[1:]) and not made.transports[NAMES[0]].is_aborted
    assert made.waits[2:] == [None]  # only the client's own time ends the last attempt


async def test_the_next_address_is_tried_at_once_after_a_failure(
    network: Callable[[], Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "NEXT_S", WAIT_S)
    monkeypatch.setattr(connecting, "CONNECT_S", 3 * WAIT_S)
    made = network()
    task = asyncio.ensure_future(connect(made.create, _connection, "engine", 80, None))
    for number, name in enumerate(NAMES[:2], 1):
        await made.has_tried(number)
        made.outcome(name).set_exception(ConnectionRefusedError(name))
    made.outcome(NAMES[2]).set_result(True)
    assert await task is made.connections[NAMES[2]]


async def test_of_addresses_that_answer_at_once_one_is_used(network: Callable[[], Network]) -> None:
    made = network()
    task = asyncio.ensure_future(connect(made.create, _connection, "engine", 80, None))
    await made.has_tried(3)
    for name in NAMES:
        made.outcome(name).set_result(True)
    used = await task
    assert [made.transports[name].is_aborted for name in NAMES] == [
        made.connections[name] is not used for name in NAMES
    ]
    assert used in made.connections.values()


async def test_a_host_of_which_no_address_answers_has_the_last_failure(network: Callable[[], Network]) -> None:
    made = network()
    task = asyncio.ensure_future(connect(made.create, _connection, "engine", 80, None))
    await made.has_tried(3)
    for name in reversed(NAMES):
        made.outcome(name).set_exception(ConnectionRefusedError(name))
    with pytest.raises(ConnectionRefusedError, match=NAMES[2]):
        await task


async def test_a_caller_that_leaves_ends_all_attempts(network: Callable[[], Network]) -> None:
    made = network()
    task = asyncio.ensure_future(connect(made.create, _connection, "engine", 80, None))
    await made.has_tried(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(made.cancelled) == sorted(NAMES)
