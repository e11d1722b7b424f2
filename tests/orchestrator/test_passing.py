"""The connection passes events on while the client keeps up, and else the task: each once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StarlingError
from stages.orchestrator.engine_connection import MAX_UNREAD_BYTES, Connection, Exchange
from stages.orchestrator.event_cutter import EventCutter
from stages.orchestrator.forward import Tries
from stages.orchestrator.passing import Passing
from stages.orchestrator.upstream import Unreachable

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Transport(asyncio.Transport):
    """Of a connection whose bytes the test brings."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = self.is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.is_held = True

    def resume_reading(self) -> None:
        self.is_held = False

    def abort(self) -> None:
        self.is_aborted = True


class Client:
    """It accepts at once what `has_room` says; what is written otherwise waits for `may_write`."""

    def __init__(self, has_room: list[bool]) -> None:
        self.is_begun = True
        self.data = b""
        self.n_now = self.n_waited = 0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._has_room = has_room

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        raise NotImplementedError

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()
        self.n_waited += 1
        self.data += data

    def write_now(self, data: bytes) -> bool:
        if not (self._has_room.pop(0) if self._has_room else True):
            return False
        self.n_now += 1
        self.data += data
        return True

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        raise NotImplementedError


class Stream:
    """An answer that has begun, and the task that passes it on."""

    def __init__(self, client: Client, *, is_at_once: bool = False) -> None:
        """`is_at_once`: it is passed on from its head on, before the task has run."""
        self.client = client
        self.cutter = EventCutter()
        self.tries = Tries(lambda: 0.0)
        self.noted: list[bytes] = []  # what the client had
        self.n_accepted = 0
        self.passing = Passing(self.cutter, self.tries, client, "v", "", self._accept, self._note)
        self.transport = Transport()
        self.connection = Connection(lambda connection: None, lambda connection: None)
        self.connection.connection_made(self.transport)
        self.answer: Exchange = self.connection.send("POST", b"", b"", self.passing.begin if is_at_once else None)
        self.connection.data_received(HEAD)
        self.task = asyncio.ensure_future(self._run())

    def _accept(self) -> None:
        self.n_accepted += 1

    def _note(self, headers: Mapping[str, str]) -> None:
        assert headers["transfer-encoding"] == "chunked"
        self.noted.append(self.client.data)

    async def _run(self) -> None:
        await self.answer.head()
        if not self.passing.is_accepted:
            self.passing.begin(self.answer)
        while await self.answer.pass_to(self.passing.take):
            await self.passing.deliver()
            if self.cutter.error:
                return

    def is_held(self) -> bool:
        return self.transport.is_held

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def event(number: int, n_bytes: int = 1) -> bytes:
    return b'id: r:%d\ndata: {"n":"%b"}\n\n: tokens 0 %d 0 7\n\n' % (number, b"x" * n_bytes, number - 1)


def shown(numbers: range, n_bytes: int = 1) -> bytes:
    return b"".join(event(number, n_bytes).partition(b": tokens")[0] for number in numbers)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@given(
    st.lists(st.booleans(), max_size=12),
    st.lists(st.integers(1, 400), max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.integers(1, 12),
    st.booleans(),
)
def test_however_a_stream_is_cut_and_its_client_reads_each_event_comes_once(
    has_room: list[bool], sizes: list[int], pauses: list[bool], n_events: int, is_at_once: bool
) -> None:
    async def check() -> None:
        stream = Stream(Client(has_room), is_at_once=is_at_once)
        sent = b"".join(chunk(event(number)) for number in range(1, n_events + 1)) + chunk(b"data: [DONE]\n\n") + END
        at = 0
        for size, pauses_here in zip([*sizes, len(sent)], [*pauses, True]):
            if part := sent[at : at + size]:
                stream.connection.data_received(part)
            at += size
            if pauses_here:
                await stream.settle()
                # What the cursor says is what the client has, but for what waits for it.
                assert stream.client.data.count(b"\ndata: {") in (stream.cutter.n_events, stream.cutter.n_events - 1)
        await stream.task
        assert stream.client.data == shown(range(1, n_events + 1)) + b"data: [DONE]\n\n"
        assert stream.cutter.is_over and stream.cutter.n_events == n_events + 1
        assert stream.cutter.output.counts() == [n_events] and stream.tries.version == "v"
        assert stream.n_accepted == len(stream.noted) == 1

    asyncio.run(check())


async def test_the_first_event_is_passed_on_before_anything_else_is_done() -> None:
    stream = Stream(Client([]), is_at_once=True)
    stream.connection.data_received(chunk(event(1)))
    assert stream.client.data == shown(range(1, 2)) and stream.client.n_now == 1
    assert stream.n_accepted == 1 and stream.noted == [stream.client.data]
    await stream.settle()
    stream.connection.data_received(chunk(event(2)))
    assert stream.client.data == shown(range(1, 3))
    stream.connection.data_received(chunk(b"data: [DONE]\n\n") + END)
    await stream.task
    assert stream.connection.is_open and stream.n_accepted == len(stream.noted) == 1


@pytest.mark.parametrize("is_early", [False, True])
async def test_an_engine_that_dies_before_the_task_has_run_is_noticed(is_early: bool) -> None:
    stream = Stream(Client([]), is_at_once=True)
    if not is_early:
        stream.connection.data_received(chunk(event(1)))
    stream.connection.connection_lost(None)
    with pytest.raises(Unreachable, match="closed"):
        await stream.task
    assert stream.cutter.n_events == (not is_early) and stream.client.n_waited == 0


async def test_an_answer_that_is_complete_before_the_task_has_run_ends() -> None:
    stream = Stream(Client([]), is_at_once=True)
    stream.connection.data_received(chunk(event(1)) + chunk(b"data: [DONE]\n\n") + END)
    await stream.task
    assert stream.client.data == shown(range(1, 2)) + b"data: [DONE]\n\n" and stream.client.n_waited == 0


async def test_a_client_that_keeps_up_gets_events_without_a_task() -> None:
    stream = Stream(Client([]))
    await stream.settle()
    stream.connection.data_received(chunk(event(1)))  # its task waits for the first part
    await stream.settle()
    for number in range(2, 6):
        stream.connection.data_received(chunk(event(number)))
        assert stream.client.data == shown(range(1, number + 1)) and stream.cutter.last_id == b"r:%d" % number
    assert (stream.client.n_now, stream.client.n_waited) == (5, 0)
    stream.connection.data_received(chunk(b"data: [DONE]\n\n") + END)
    await stream.task
    assert stream.connection.is_open


async def test_a_client_that_does_not_read_holds_its_engine_back_and_misses_nothing() -> None:
    client = Client([True, False])
    stream = Stream(client)
    await stream.settle()
    stream.connection.data_received(chunk(event(1)))
    await stream.settle()
    client.may_write.clear()
    n_bytes, number = 30_000, 1
    while not stream.is_held():
        number += 1
        stream.connection.data_received(chunk(event(number, n_bytes)))
        await stream.settle()
        assert number * n_bytes < 2 * MAX_UNREAD_BYTES
    assert client.data == shown(range(1, 2))
    client.may_write.set()
    await stream.settle()
    assert not stream.is_held() and client.n_waited == 1
    assert client.data == shown(range(1, 2)) + shown(range(2, number + 1), n_bytes)
    stream.connection.data_received(chunk(b"data: [DONE]\n\n") + END)
    await stream.task


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_an_engine_that_dies_between_two_events_is_noticed(is_aborted: bool) -> None:
    stream = Stream(Client([]))
    await stream.settle()
    for number in (1, 2):
        stream.connection.data_received(chunk(event(number)))
        await stream.settle()
    stream.connection.data_received(chunk(event(3))[:20])
    if is_aborted:
        stream.answer.abort("the agent has died")
    else:
        stream.connection.connection_lost(None)
    with pytest.raises(Unreachable, match="the agent has died" if is_aborted else "closed"):
        await stream.task
    assert stream.client.data == shown(range(1, 3)) and stream.cutter.last_id == b"r:2"


async def test_an_error_of_the_engine_is_not_passed_on() -> None:
    stream = Stream(Client([]))
    await stream.settle()
    for data in (event(1), event(2) + b'id: r:2e\ndata: {"error":{"code":"DRAINING"}}\n\n'):
        stream.connection.data_received(chunk(data))
        await stream.settle()
    await stream.task
    assert stream.cutter.error and stream.client.data == shown(range(1, 3))


async def test_a_client_that_has_left_ends_the_task() -> None:
    class Gone(Client):
        async def write(self, data: bytes) -> None:
            raise ConnectionResetError("the client has disconnected")

    stream = Stream(Gone([True, False]))
    await stream.settle()
    for number in (1, 2, 3):
        stream.connection.data_received(chunk(event(number)))
        await stream.settle()
    with pytest.raises(ConnectionResetError):
        await stream.task
    assert stream.client.data == shown(range(1, 2))


async def test_what_fails_in_the_connection_is_raised_by_the_task() -> None:
    class Broken(Client):
        def write_now(self, data: bytes) -> bool:
            raise RuntimeError("broken")

    stream = Stream(Broken([]))
    await stream.settle()
    stream.connection.data_received(chunk(event(1)))
    with pytest.raises(RuntimeError, match="broken"):
        await stream.task
