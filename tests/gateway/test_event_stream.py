"""Event streams as bytes: one chunk per step, and a bound for slow clients."""

from __future__ import annotations

import asyncio
import json

import pytest

from pipeline.api.requests import chat
from pipeline.errors import StarlingError
from stages.gateway.endpoints.chat_formatter import ChatFormatter
from stages.gateway.endpoints.message_formatter import BlockEvent
from stages.gateway.http.block_stream import BlockStream
from stages.gateway.http.sinks import MAX_BACKLOG_BYTES, EventStream
from stages.gateway.requests.state import RequestState
from tests.gateway.request_states import make_state


class Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.backlog = 0

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.backlog


def make(n: int = 1) -> tuple[EventStream, RequestState, list[str]]:
    ask = chat.read({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "n": n})
    request = make_state("req-1", ask, model="m", max_tokens=9, stop_ids=())
    dropped: list[str] = []
    return EventStream(request, ChatFormatter(request, {}), dropped.append), request, dropped


async def test_events_before_the_headers_are_sent_in_one_write_after_them() -> None:
    stream, request, _ = make()
    transport = Transport()
    (sequence,) = request.sequences
    stream.text(sequence, 'He said "Ä\n"', 0, 2)
    stream.flush()
    assert not transport.writes
    assert stream.begun.done()
    stream.attach(transport, is_chunked=True)  # type: ignore[arg-type]
    (write,) = transport.writes
    size, _, rest = write.partition(b"\r\n")
    assert int(size, 16) == len(rest) - 2
    first, second, empty = rest[:-2].split(b"\n\n")
    assert empty == b""
    assert first.startswith(b"retry: 1000\nid: req-1:0\ndata: {")
    name, _, data = second.partition(b"\ndata: ")
    assert name == b"id: req-1:2"
    assert json.loads(data)["choices"][0]["delta"] == {"content": 'He said "Ä\n"'}


async def test_a_step_is_one_write_for_any_number_of_choices() -> None:
    stream, request, _ = make(3)
    transport = Transport()
    stream.attach(transport, is_chunked=False)  # type: ignore[arg-type]
    for index, sequence in enumerate(request.sequences):
        stream.text(sequence, "a", 0, index + 1)
    stream.flush()
    (write,) = transport.writes
    assert write.count(b"data: ") == 3 + 3
    assert b"id: req-1:1.2.3\n" in write


async def test_text_that_is_held_back_makes_no_event() -> None:
    stream, request, _ = make()
    transport = Transport()
    stream.attach(transport, is_chunked=False)  # type: ignore[arg-type]
    stream.text(request.sequences[0], "", 0, 1)
    stream.flush()
    stream.text(request.sequences[0], "", 1, 2)
    stream.flush()
    assert len(transport.writes) == 1  # the role


async def test_a_slow_client_is_dropped_once() -> None:
    stream, request, dropped = make()
    transport = Transport()
    stream.attach(transport, is_chunked=True)  # type: ignore[arg-type]
    transport.backlog = MAX_BACKLOG_BYTES + 1000  # the opening events, some 200 bytes, do not count
    for end in range(5):
        stream.text(request.sequences[0], "x", end, end + 1)
        stream.flush()
    (reason,) = dropped
    assert "reads too slowly" in reason
    assert len(transport.writes) == 1


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_an_orchestrator_stores_does_not_count_as_backlog(is_late: bool) -> None:
    class Formatter:
        def opening_events(self) -> list[BlockEvent]:
            return []

        def closing_events(self) -> list[BlockEvent]:
            return [BlockEvent(b"response.completed", b"{}", 1)]

        def kept(self) -> bytes:
            return b"x" * (2 * MAX_BACKLOG_BYTES)

    class Unread(Transport):
        def get_write_buffer_size(self) -> int:
            return self.backlog + sum(map(len, self.writes))

    _, request, dropped = make()
    stream = BlockStream(request, Formatter(), dropped.append)  # type: ignore[arg-type]
    stream.is_relayed = True
    transport = Unread()
    transport.backlog = MAX_BACKLOG_BYTES if is_late else 0
    stream.attach(transport, is_chunked=False)  # type: ignore[arg-type]
    stream.finished()
    stream.flush()
    assert sum(map(len, transport.writes)) > 2 * MAX_BACKLOG_BYTES
    assert bool(dropped) == is_late


async def test_an_error_before_the_first_event_is_raised_and_a_later_one_is_sent() -> None:
    error = StarlingError("INFERENCE", "no")
    stream, request, _ = make()
    stream.failed(error)
    with pytest.raises(StarlingError):
        await stream.begun
    assert stream.over.done()

    stream, request, _ = make()
    transport = Transport()
    stream.attach(transport, is_chunked=False)  # type: ignore[arg-type]
    stream.text(request.sequences[0], "x", 0, 1)
    stream.failed(error)
    stream.flush()
    (write,) = transport.writes
    assert write.endswith(b"data: [DONE]\n\n")
    assert json.loads(write.split(b"data: ")[-2])["error"]["code"] == "INFERENCE"
    await stream.over


async def test_a_stream_without_text_gets_comments_while_its_client_reads() -> None:
    stream, request, _ = make()
    transport = Transport()
    stream.attach(transport, is_chunked=False)  # type: ignore[arg-type]
    waiting = asyncio.create_task(stream.until_over(0.001))
    async with asyncio.timeout(60):
        while len(transport.writes) < 3:
            await asyncio.sleep(0)
        assert set(transport.writes) == {b":\n"}
        transport.backlog = 1
        stream.text(request.sequences[0], "a", 0, 1)
        stream.finished()
        await waiting
    stream.flush()
    assert transport.writes[-1].endswith(b"data: [DONE]\n\n")
