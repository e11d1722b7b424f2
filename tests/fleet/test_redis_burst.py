"""Many calls of a process at once to a server in the test's process: they wait for a connection, within their bound."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from pipeline.coordination.interface import Item
from pipeline.coordination.redis_store import MAX_CONNECTIONS, MAX_WAITING, RedisStore
from pipeline.errors import StorageUnavailable
from tests.fleet.coordination_stores import LIMIT_S, until

pytest.importorskip("redis", reason="redis-py is not installed: make fleet-peers")

CALLS = 300
MAX_CALLS = MAX_CONNECTIONS - MAX_WAITING  # with a connection


class Server:
    """Answers each call with a value that was written in revision 7, or with no change, when `gates` allow it."""

    def __init__(self) -> None:
        self.gates = {b"EVALSHA": asyncio.Event(), b"XREAD": asyncio.Event()}
        self.received: Counter[bytes] = Counter()  # by command
        self.n_open = self.most_open = 0  # connections
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> RedisStore:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return RedisStore("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        try:
            while head := await reader.readline():
                words = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                command = words[0].upper()
                self.received[command] += 1
                if command in self.gates:
                    await self.gates[command].wait()
                writer.write(self._answer(command, words))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has closed it
        finally:
            self.n_open -= 1
            self._tasks.discard(task)
            writer.close()

    @staticmethod
    def _answer(command: bytes, words: list[bytes]) -> bytes:
        if command == b"XREAD":
            return b"*-1\r\n"
        if command != b"EVALSHA":
            return b"+OK\r\n"
        result = b"$8\r\nsnapshot\r\n*0\r\n" if b"updates" in words else b"$1\r\nv\r\n$1\r\n7\r\n"
        return b"*5\r\n$2\r\nok\r\n$1\r\n7\r\n$-1\r\n" + result


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    await made.stop()


async def test_calls_beyond_the_connections_wait_for_one(server: Server) -> None:
    async with await server.start() as store:
        calls = [asyncio.create_task(store.get(f"a{number}")) for number in range(CALLS)]
        await until(lambda: server.received[b"EVALSHA"] == MAX_CALLS)
        assert not any(call.done() for call in calls)
        server.gates[b"EVALSHA"].set()
        assert await asyncio.gather(*calls) == [Item(f"a{number}", b"v", 7) for number in range(CALLS)]
        assert server.most_open == MAX_CALLS


async def test_watchers_that_wait_leave_connections_to_calls(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.coordination.redis_store.CALL_S", LIMIT_S)
    async with await server.start() as store:
        server.gates[b"EVALSHA"].set()
        watchers = [asyncio.create_task(_drain(store)) for _ in range(MAX_CONNECTIONS + 6)]
        await until(lambda: server.received[b"XREAD"] == MAX_WAITING)
        await until(lambda: server.received[b"EVALSHA"] >= len(watchers))
        assert await store.get("a") == Item("a", b"v", 7)
        assert server.received[b"XREAD"] == MAX_WAITING
        for watcher in watchers:
            watcher.cancel()
        await asyncio.wait(watchers)


async def test_a_call_that_waits_for_a_connection_has_the_bound_of_all(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait fail with those that were sent, and are not sent after them."""
    monkeypatch.setattr("pipeline.coordination.redis_store.CALL_S", 1.0)
    async with await server.start() as store:
        async with asyncio.timeout(LIMIT_S):
            ends = await asyncio.gather(*(store.get("a") for _ in range(CALLS)), return_exceptions=True)
        assert {(type(end), str(end).split(": ", 1)[1]) for end in ends} == {
            (StorageUnavailable, "no answer within 1 s")
        }
        assert server.received[b"EVALSHA"] <= 2 * MAX_CALLS
        server.gates[b"EVALSHA"].set()
        assert await store.get("a") == Item("a", b"v", 7), "no connection is lost"


async def _drain(store: RedisStore) -> None:
    async for _ in store.watch(""):
        pass
