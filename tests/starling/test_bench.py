"""`starling bench`, the instrument: what it reports of servers whose every delay is known.

Time is a number that the server advances, and only while the client waits; so delays are reported exactly or wrongly,
however busy the machine is.  Connections are real.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InvalidRequest
from starling.bench.connection import Sender, Target
from starling.bench.distribution import MAX_TOKENS, Lengths
from starling.bench.figures import Figures, Latency, lines, measure, percentile
from starling.bench.framing import ResponseReader
from starling.bench.load import Arrival, Run, closed_loop, open_loop
from starling.bench.plan import Plan, read_trace
from starling.bench.response import ClientRequest, Response

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str = "", finish: str | None = None, **more: object) -> bytes:
    choices = [] if "usage" in more else [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class World:
    """A server that advances the client's clock: by `first_s` before a stream, by `gap_s` between its tokens."""

    def __init__(self, first_s: float, gap_s: float, tokens: int, counts: bool = True) -> None:
        self.first_s, self.gap_s, self.tokens, self.counts = first_s, gap_s, tokens, counts
        self.now = 0.0
        self.tokens_sent = 0
        self.target = Target("127.0.0.1")
        self._turn = asyncio.Lock()  # one stream at a time
        self._changed = asyncio.Condition()
        self._received = asyncio.Event()

    def clock(self) -> float:
        return self.now

    def on_data(self, _: Response) -> None:
        self._received.set()

    async def wait_until(self, when: float) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.now >= when)

    async def _advance(self, seconds: float) -> None:
        async with self._changed:
            self.now += seconds
            self._changed.notify_all()

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Time stands still until the client has it."""
        self._received.clear()
        writer.write(data)
        await self._received.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                async with self._turn:
                    await self._stream(writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        data = HEAD
        for number in range(self.tokens):
            await self._advance(self.gap_s if number else self.first_s)
            self.tokens_sent += 1
            await self._write(writer, data + chunk(event(" word", "length" if number + 1 == self.tokens else None)))
            data = b""
        usage = {"prompt_tokens": 7, "completion_tokens": self.tokens}
        end = chunk(event(usage=usage)) if self.counts else b""
        await self._write(writer, end + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Sender]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.target = Target(*server.sockets[0].getsockname())
        async with server:
            async with Sender(self.target, clock=self.clock, on_data=self.on_data) as sender:
                yield sender
            server.close()


def requests(count: int) -> list[ClientRequest]:
    return [ClientRequest({"prompt": "x"}) for _ in range(count)]


def figures(world: World, sender: Sender) -> Figures:
    return measure(Run(sender.parse(), 0.0, world.now))


async def test_known_delays_are_reported_as_they_are() -> None:
    world = World(first_s=0.25, gap_s=0.03125, tokens=9)
    async with world.running() as sender:
        await sender.open(1)
        await closed_loop(sender, [requests(4)])
    found = figures(world, sender)
    assert (found.requests, found.complete, found.failed) == (4, 4, 0)
    exactly = {"p50": 250.0, "p90": 250.0, "p99": 250.0, "mean": 250.0, "max": 250.0}
    assert found.first_token_ms == Latency(count=4, **exactly)
    assert found.between_tokens_ms == Latency(32, *[31.25] * 5)
    assert found.per_token_ms == Latency(4, *[31.25] * 5)
    assert found.end_to_end_ms == Latency(4, *[500.0] * 5)
    assert found.seconds == 2.0
    assert found.output_tokens == found.output_events == world.tokens_sent == 36
    assert (found.output_tokens_per_s, found.requests_per_s) == (18.0, 2.0)
    assert (found.prompt_tokens, found.uncounted) == (28, 0)


async def test_clients_wait_for_each_other() -> None:
    world = World(first_s=1.0, gap_s=0.5, tokens=3)
    async with world.running() as sender:
        await sender.open(3)
        await closed_loop(sender, [requests(1) for _ in range(3)])
    found = sorted(response.total_s for response in sender.parse())
    assert found == [2.0, 4.0, 6.0]
    assert sorted(response.first_s for response in sender.responses) == [1.0, 3.0, 5.0]


async def test_an_open_loop_hides_no_waiting() -> None:
    """The server takes 1 s for each request, one is due every 0.125 s, and only one may be under way."""
    world = World(first_s=1.0, gap_s=0.0, tokens=1)
    async with world.running() as sender:
        arrivals = [Arrival(0.125 * k, request) for k, request in enumerate(requests(8))]
        await open_loop(sender, arrivals, 0.0, 1, world.wait_until)
    responses = sender.parse()
    assert [response.total_s for response in responses] == [1.0 + 0.875 * k for k in range(8)]
    assert [response.ended - response.sent for response in responses] == [1.0] * 8  # what would have been hidden
    found = figures(world, sender)
    assert (found.sent_late_ms.max, found.end_to_end_ms.max) == (6125.0, 7125.0)


async def test_tokens_of_a_server_that_does_not_count_are_its_events() -> None:
    world = World(first_s=0.5, gap_s=0.5, tokens=5, counts=False)
    async with world.running() as sender:
        await closed_loop(sender, [requests(2)])
    found = figures(world, sender)
    assert (found.output_tokens, found.uncounted, world.tokens_sent) == (10, 2, 10)
    assert any("without usage" in line for line in lines(found, is_open=False))


async def test_memory_is_bounded_by_reading_responses_early() -> None:
    world = World(first_s=0.5, gap_s=0.25, tokens=4)
    async with world.running() as sender:
        small = Sender(world.target, clock=world.clock, on_data=world.on_data, max_unparsed=600)
        async with small:
            await closed_loop(small, [requests(5)])
        assert sum(bool(response.parts) for response in small.responses) <= 2
        await closed_loop(sender, [requests(5)])
    early, late = small.parse(), sender.parse()
    assert [one.first_s for one in early] == [one.first_s for one in late]
    assert [one.gaps_s for one in early] == [one.gaps_s for one in late]
    assert {one.tokens for one in early} == {4}


# ------------------------------------------------------------------ framing


@given(
    st.binary(max_size=60), st.lists(st.integers(1, 20), max_size=5), st.sampled_from(["chunked", "length", "close"])
)
@settings(deadline=None)
def test_a_response_ends_where_it_ends_however_it_is_cut(body: bytes, cuts: list[int], kind: str) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    match kind:
        case "chunked":
            parts = [body[at : at + 7] for at in range(0, len(body), 7)]
            raw = HEAD + b"".join(map(chunk, parts)) + b"0\r\nTrailer: x\r\n\r\n"
        case "length":
            raw = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        case _:
            raw = b"HTTP/1.0 200 OK\r\n\r\n" + body
    raw = interim + raw
    reader, found, at = ResponseReader(), b"", 0
    for size in [*cuts, *[1] * len(raw)]:
        assert not reader.has_ended
        found += reader.feed(raw[at : at + size])
        at += size
        if at >= len(raw):
            break
    assert reader.end()
    assert (found, reader.status) == (body, 200)
    assert reader.keeps_connection == (kind != "close")


@given(st.integers(1, len(HEAD + chunk(b"data") + b"0\r\n\r\n") - 1))
def test_a_cut_response_is_not_complete(size: int) -> None:
    reader = ResponseReader()
    reader.feed((HEAD + chunk(b"data") + b"0\r\n\r\n")[:size])
    assert not reader.end()


@pytest.mark.parametrize(
    "raw", [b"SSH-2.0-x\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\n", HEAD + b"1\r\nab\r\n", HEAD + b"1" * 2000]
)
def test_what_is_no_http_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        ResponseReader().feed(raw)


# ------------------------------------------------------------------ plans


@given(st.sampled_from(["128", "uniform:5:50", "normal:200:50", "lognormal:200:0.8", "exponential:200"]), st.integers())
def test_lengths_are_bounded_and_repeatable(text: str, seed: int) -> None:
    lengths = Lengths.parse(text)
    drawn = [lengths.draw(random.Random(seed)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert 1 <= drawn[0] <= MAX_TOKENS
    if text.startswith("uniform"):
        assert 5 <= drawn[0] <= 50


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "nan", "normal:5", "normal:5:-1", "uniform:9:3", "uniform:1:2:3", "zipf:3", "inf"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="uniform:LOW:HIGH|from 1 to|whole numbers"):
        Lengths.parse(text)


def plan(**changes: object) -> Plan:
    fixed = {"prompt_tokens": Lengths.parse("uniform:5:9"), "max_tokens": Lengths.parse("4")}
    return Plan(**{"model": "m", "path": "/v1/completions", "is_chat": False, **fixed, **changes})  # type: ignore[arg-type]


def bodies(plan: Plan, count: int = 20) -> list[dict[str, object]]:
    return [request.body for request, _ in zip(plan.requests(), range(count), strict=False)]


def test_a_seed_gives_the_same_requests() -> None:
    assert bodies(plan(seed=1)) == bodies(plan(seed=1))
    assert bodies(plan(seed=1)) != bodies(plan(seed=2))
    slow, fast = plan(seed=1).poisson(0.5), plan(seed=1).poisson(50.0)
    pairs = [(next(slow), next(fast)) for _ in range(20)]
    assert all(one.request == other.request and one.at_s > other.at_s for one, other in pairs)
    assert [one.request.body for one, _ in pairs] == bodies(plan(seed=1))


def test_arrivals_have_their_rate() -> None:
    arrivals = plan().poisson(10.0)
    last = [next(arrivals).at_s for _ in range(4000)][-1]
    assert last == pytest.approx(400.0, rel=0.1)  # six standard deviations


def test_prompts_share_prefixes_and_nothing_else() -> None:
    prompts = [str(body["prompt"]).split() for body in bodies(plan(shared_prefix=30, prefixes=2), 40)]
    assert len({tuple(words[:30]) for words in prompts}) == 2
    assert len({tuple(words[30:]) for words in prompts}) == 40
    assert all(35 <= len(words) <= 39 for words in prompts)


def test_fields_come_last_and_chats_have_messages() -> None:
    body = bodies(plan(is_chat=True, fields={"temperature": 0.5, "max_tokens": 9}))[0]
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.5, 9, True)
    assert "prompt" not in body
    assert isinstance(body["messages"], list)


def test_a_trace_is_replayed_by_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 2, "prompt": "later", "max_tokens": 3}\n\n{"at_s": 0.5, "prompt_tokens": 12}\n')
    first, second = plan().replay(read_trace(path))
    assert (first.at_s, len(first.request.body["prompt"].split()), first.request.body["max_tokens"]) == (0.5, 12, 4)
    assert (second.at_s, second.request.body["prompt"], second.request.body["max_tokens"]) == (2.0, "later", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"at_s": 1}\n{"at_s": -1}\n', "line 2: .*at_s"),
        ('{"at_s": 1, "prompts": "x"}', "line 1: .*prompts"),
        ('{"at_s": 1, "prompt": "x", "prompt_tokens": 3}', "line 1: give prompt or prompt_tokens"),
        ("nonsense", "line 1"),
        ("\n", "no requests"),
    ],
)
def test_a_wrong_trace_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        read_trace(path)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], part: float) -> None:
    found = percentile(values, part)
    assert found in values
    assert sum(value <= found for value in values) >= part * len(values) * (1 - 1e-9)
    assert sum(value < found for value in values) < part * len(values) + 1e-9 or found == min(values)
