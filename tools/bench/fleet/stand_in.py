"""An agent and its engine that compute nothing: `python -m tools.bench.fleet.stand_in`; prints its port.

They answer as fast as they can, so that what is measured is the orchestrator.  The field `user` of a request says how
long the first event takes and the pause after each event, in ms: "0 10".  A stream has `max_tokens` events, each sent
by itself, with the comment in front that names its token (pipeline/api/output_tokens.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import cast

import msgspec
import uvloop

from pipeline.api.output_tokens import comment
from pipeline.config.schema import DEMO_MODEL
from pipeline.fleet.bodies import HeartbeatResponse, LoadedModel
from shm.pages import NUMERICS

AGENT = "stand-in"
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
_NAME = re.compile(rb"x-starling-request: *([!-:<-~]+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class _Request(msgspec.Struct):
    max_tokens: int = 1
    stream: bool = False
    user: str = "0 0"


def report(engine_url: str) -> HeartbeatResponse:
    """The state of the agent with this engine."""
    model = LoadedModel(
        model_id=DEMO_MODEL,
        model_state="READY",
        cache_level="CPU_RESIDENT",
        engine_url=engine_url,
        engine_incarnation="1",
        digest="ab" * 32,
        kv_type="f16",
        numerics=NUMERICS,
        can_continue=True,
    )
    return HeartbeatResponse(agent_id=AGENT, incarnation="1", state="INFERRING", loaded_models=(model,))


def heartbeat(port: int) -> bytes:
    """The state of the agent whose engine listens on `port`, too."""
    return msgspec.json.encode(report(f"http://127.0.0.1:{port}"))


def event(name: bytes, number: int, total: int) -> bytes:
    """One event of a completion, as an engine sends it to an orchestrator."""
    finish = b'"length"' if number == total else b"null"
    return (
        b'id: %b:%x\ndata: {"id":"%b","object":"text_completion","created":0,"model":"%b","choices":[{"index":0,'
        b'"text":" token","logprobs":null,"finish_reason":%b}]}\n\n%b'
        % (name, number, name, DEMO_MODEL.encode(), finish, comment(0, number - 1, 0, (1000 + number,)))
    )


class Exchange(asyncio.Protocol):
    """One connection: a request at a time. `state`: of the agent, by the port of the connection."""

    def __init__(self, state: Callable[[int], bytes] = heartbeat) -> None:
        self._state = state
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=16 << 10)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """Called by the event loop."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not end or len(body) < (int(length[1]) if length is not None else 0):
            return
        self._data = b""
        assert self._transport is not None
        if head.startswith(b"POST /heartbeat"):
            port = self._transport.get_extra_info("sockname")[1]
            self._whole(self._state(port))
            return
        request = msgspec.json.decode(body, type=_Request) if body else _Request()
        name = _NAME.search(head)
        self._task = asyncio.get_running_loop().create_task(
            self._answer(request, name[1] if name is not None else b"req-" + b"0" * 24)
        )

    def _whole(self, body: bytes) -> None:
        assert self._transport is not None
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    async def _answer(self, request: _Request, name: bytes) -> None:
        assert self._transport is not None
        delay_s, gap_s = (float(part) / 1000 for part in request.user.split())
        if delay_s:
            await asyncio.sleep(delay_s)
        if not request.stream:
            self._whole(b'{"id":"%b","choices":[{"index":0,"text":" token","finish_reason":"length"}]}' % name)
            return
        self._transport.write(_HEAD)
        loop = asyncio.get_running_loop()
        due = loop.time()
        for number in range(1, request.max_tokens + 1):
            self._chunk(event(name, number, request.max_tokens))
            due += gap_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._may_write.wait()
        self._chunk(b"id: %b:%xd\ndata: [DONE]\n\n" % (name, request.max_tokens))
        self._transport.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve() -> None:
    """Serve until the process is killed."""
    server = await asyncio.get_running_loop().create_server(Exchange, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
