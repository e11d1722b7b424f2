"""An engine that a test scripts byte for byte, on a real port, and a relay that sends it requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from pipeline.fleet.bodies import LoadedModel
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.forward import Bounds, Forward
from stages.orchestrator.http_client import HttpClient
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.stage import connect
from stages.orchestrator.upstream import Answer
from tests.orchestrator.agents import engine, heartbeat, request, router, view

WAIT_S = 120.0  # of a test for an event
_LENGTH = re.compile(rb"\r\nContent-Length: ([0-9]+)\r\n")


def response(status: int, body: bytes = b"{}") -> bytes:
    """A whole response."""
    return head(status, len(body)) + body


def head(status: int, length: int = 100) -> bytes:
    """Its head, after which nothing comes."""
    kind = b"Content-Type: application/json\r\n"
    return b"HTTP/1.1 %d Any\r\n%sContent-Length: %d\r\n\r\n" % (status, kind, length)


class _Connection(asyncio.Protocol):
    def __init__(self, one: LoopbackEngine) -> None:
        self._engine = one
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        given, end, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(given + b"\r\n")
        if end and len(body) >= (int(length[1]) if length else 0):
            self._received = b""
            self._engine.asked(given.partition(b"\r\n")[0].decode(), self._transport)


class LoopbackEngine:
    """It gives each request the next of its answers as it is; b"": none."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[str] = []  # the first lines
        self.transports: list[asyncio.Transport] = []  # one for each request
        self.port = 0

    def asked(self, line: str, transport: asyncio.Transport) -> None:
        self.requests.append(line)
        self.transports.append(transport)
        transport.write(self.answers.pop(0))

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    def model(self) -> LoadedModel:
        return engine(engine_url=f"http://127.0.0.1:{self.port}", can_continue=True)


class WatchedClient(HttpClient):
    """A client that counts the answers whose heads have come."""

    def __init__(self) -> None:
        super().__init__(connect, time.monotonic)
        self.n_answers = 0

    async def open(self, *given: Any, **more: Any) -> Answer:
        answer = await super().open(*given, **more)
        self.n_answers += 1
        return answer


class Clock:
    """It advances as the test says, and while the relay waits."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def wait(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Relaying:
    """A relay with its clock and its client."""

    def __init__(self, *models: LoadedModel) -> None:
        async def poll(record: object) -> Any:
            return heartbeat("a")

        async def load(*wanted: str) -> None:
            raise NotImplementedError

        self.clock, self.client = Clock(), WatchedClient()
        self.relay = Relay(
            self.client,
            router(*(view(name, model) for name, model in zip("ab", models))),
            Registry(poll, self.clock),
            ColdLoads(load, 1, self.clock),
            Bounds(1.0, 1000.0),
            self.clock,
            self.clock.wait,
        )


@contextlib.asynccontextmanager
async def relaying(*engines: LoopbackEngine) -> AsyncIterator[Relaying]:
    """A relay before agents "a", "b", ... with one engine each."""
    async with contextlib.AsyncExitStack() as stack:
        for one in engines:
            await stack.enter_async_context(one.listening())
        made = Relaying(*(one.model() for one in engines))
        try:
            yield made
        finally:
            await made.relay.close()
            await made.client.close()


def keyed(digest: bytes = b"", **fields: Any) -> Forward:
    """A request with a key. `digest`: of its body."""
    headers = {"Idempotency-Key": "k"}
    return Forward(
        routed=request(),
        path="/v1/completions",
        body=b'{"body":"%s"}' % digest,
        headers=headers,
        digest=digest,
        **fields,
    )
