"""The replay buffer: it stays within its bounds, and an answer has the same bytes as when the request ended."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.requests import chat, completions, generate
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import StarlingError
from pipeline.protocol.messages import Logprob, Sampling
from stages.gateway.endpoints.chat_formatter import ChatFormatter
from stages.gateway.endpoints.completion_formatter import CompletionFormatter
from stages.gateway.endpoints.generate_formatter import GenerateFormatter
from stages.gateway.http.sinks import EventStream
from stages.gateway.requests.event_cursor import ChoiceCursor, EventCursor
from stages.gateway.requests.journal import KEEP_S, MAX_ENDED, Journal, RequestEnd, parse
from stages.gateway.requests.readers import FanOutSink, Readers
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.replay_buffer import ENTRY_BYTES, ReplayBuffer, to_record
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, SequenceState
from stages.gateway.requests.state_writer import StateWriter
from tests.gateway.journal_records import NOW, open_journal, part_of, recovered, spec_of
from tests.gateway.journal_records import make_spec as make_journal_spec
from tests.gateway.peers import Generator, make_token_bytes
from tests.gateway.request_states import make_state
from tests.gateway.vocabularies import vocabulary_of
from tests.properties import examples

GATEWAY = str(Path(__file__).resolve().parents[2] / "stages" / "gateway" / "*")

BYTES = vocabulary_of([bytes([token]) for token in range(256)])
FORMATTERS: dict[str, Callable[[RequestState, Any], Any]] = {
    "generate": GenerateFormatter,
    "chat": ChatFormatter,
    "completions": CompletionFormatter,
}


def generation_of(endpoint: str, n: int, logprobs: int) -> GenerationRequest:
    body: dict[str, Any] = {"model": "m", "n": n, "stream": True, "stop": ["\n\n"], "seed": 2**64 - 1}
    if endpoint == "chat":
        more = {"messages": [{"role": "user", "content": "x" * 400}], "stream_options": {"include_usage": True}}
        return chat.read({**body, **more, **({"logprobs": True, "top_logprobs": logprobs} if logprobs else {})})
    body = {**body, "prompt": "x" * 400, **({"logprobs": logprobs} if logprobs else {})}
    if endpoint == "completions":
        return completions.read(body if logprobs else {**body, "echo": True})
    return generate.read(body)


@st.composite
def requests(draw: st.DrawFn) -> RequestState:
    """A request that finished, or failed in the middle of its text."""
    endpoint = draw(st.sampled_from(sorted(FORMATTERS)))
    n, top = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    request = make_state(
        f"req-{draw(st.integers(0, 40)):x}",
        generation_of(endpoint, n, top),
        started_at=1.5,
        model="m",
        tenant="mine",
        client_id="mine",
        version="m@1",
        seed=2**64 - 1,
        tokenizer="ab" * 32,
        echoes=("x" * 400,),
        prompt=b"1234" * 99,
        max_tokens=900,
    )
    request.response_cache = "miss"
    error = StarlingError("TIMEOUT", "over", "p", status=418, retry_after_s=2.5) if draw(st.booleans()) else None
    for sequence in request.sequences:
        sequence.tokens = draw(st.lists(st.integers(32, 122), max_size=60))
        values = st.floats(-50, 0) | st.just(-math.inf)
        if top:
            sequence.logprobs = [Logprob(draw(values), ((t, draw(values)), (65, -1.5))[:top]) for t in sequence.tokens]
        sequence.n_emitted = draw(st.integers(0, len(sequence.tokens)))
        text = bytes(sequence.tokens[: sequence.n_emitted]).decode()
        cut = draw(st.integers(0, len(text)))
        sequence.text, sequence.text_length = [text[:cut], text[cut:]], len(text)
        sequence.n_used, sequence.cached_tokens, sequence.first_token_at = sequence.n_emitted, 3, 2.25
        is_over = error is None or draw(st.booleans())
        if is_over:
            sequence.finish_reason, sequence.is_flushed = draw(st.sampled_from(["stop", "length"])), True
            sequence.stop_string = "\n\n" if sequence.finish_reason == "stop" else ""
        sequence.move(SequencePhase.FINISHED if is_over else SequencePhase.FAILED)
    request.error = error
    request.end(Outcome.FAILED if error is not None else Outcome.FINISHED)
    return request


class Wire:
    """A transport that stores what a stream writes."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def resumed(request: RequestState, cursor: EventCursor | None) -> bytes:
    """The bytes that a client receives which resumes at `cursor`."""
    stream = EventStream(request, FORMATTERS[request.spec.generation.endpoint](request, BYTES), lambda reason: None)
    received = [place.tokens for place in cursor.choices] if cursor is not None else []
    wire = Wire()
    stream.resume(request, cursor.choices if cursor is not None else (), received)
    stream.attach(wire, is_chunked=False)  # type: ignore[arg-type]
    if stream.begun.done() and stream.begun.exception() is not None:
        return repr(stream.begun.exception()).encode()
    return wire.data


async def test_a_restored_request_gives_the_same_bytes() -> None:
    @settings(deadline=None, max_examples=150)
    @given(requests(), st.data())
    def check(request: RequestState, data: st.DataObject) -> None:
        buffer = ReplayBuffer(lambda: 0.0)
        assert buffer.put(request)
        found = buffer.find(request.id)
        assert found is not None
        assert found is not request
        cursors: list[EventCursor | None] = [None]
        places = tuple(
            ChoiceCursor(
                data.draw(st.integers(0, s.n_emitted)),
                data.draw(st.sampled_from([0, 2, 3]) if s.finish_reason else st.just(0)),
            )
            for s in request.sequences
        )
        cursors.append(EventCursor(request.id, places))
        for cursor in cursors:
            assert resumed(found, cursor) == resumed(request, cursor)
        formatter = FORMATTERS[request.spec.generation.endpoint]
        assert formatter(found, BYTES).whole_response() == formatter(request, BYTES).whole_response()
        for name in (
            "outcome",
            "first_token_at",
            "started_at",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "response_cache",
        ):
            assert getattr(found, name) == getattr(request, name)
        assert found.spec == request.spec.without_prompts()
        if request.error is not None and found.error is not None:
            assert found.error.body() == request.error.body()
            assert (found.error.status, found.error.headers()) == (418, {"Retry-After": "3"})
        assert (found.error is None) == (request.error is None)

    check()


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(requests(), max_size=30), st.integers(1, 5000), st.integers(1, 8))
def test_the_bounds_hold_and_the_oldest_entries_are_dropped_first(
    several: list[RequestState], max_bytes: int, most: int
) -> None:
    buffer = ReplayBuffer(lambda: 0.0, max_bytes, most)
    model: dict[str, int] = {}
    for request in several:
        size = len(to_record(request)) + ENTRY_BYTES
        model.pop(request.id, None)
        assert buffer.put(request) == (size <= max_bytes)
        if size <= max_bytes:
            model[request.id] = size
            while len(model) > most or sum(model.values()) > max_bytes:
                del model[next(iter(model))]
        assert buffer.bytes == sum(model.values()) <= max_bytes
        assert len(buffer) == len(model) <= most
        assert [name for name in (r.id for r in several) if buffer.find(name) is None] == [
            r.id for r in several if r.id not in model
        ]


@pytest.mark.parametrize("max_bytes", [1 << 30, 40_000])
def test_a_tenant_drives_out_only_its_own_answers(max_bytes: int) -> None:
    buffer = ReplayBuffer(lambda: 0.0, max_bytes, 20)
    for i in range(8):
        buffer.put(make_state(f"b{i}", tenant="b"))
    for i in range(300):
        buffer.put(make_state(f"a{i}", tenant="a"))
    assert all(buffer.find(f"b{i}") for i in range(8))
    assert buffer.find("a299")
    assert len(buffer) <= 20
    assert buffer.bytes <= max_bytes


def test_a_large_answer_takes_no_place_of_other_tenants() -> None:
    buffer = ReplayBuffer(lambda: 0.0, 20_000, 100)
    while buffer.bytes < 15_000:
        buffer.put(make_state(f"b{len(buffer)}", tenant="b"))
    kept = len(buffer)
    large = make_state("a", tenant="a")
    large.sequences[0].text = ["x" * 12_000]
    assert len(to_record(large)) < buffer.max_bytes
    assert not buffer.put(large)
    assert len(buffer) == kept and all(buffer.find(f"b{i}") for i in range(kept))


def test_concurrent_readers_share_one_restored_request() -> None:
    now = [0.0]
    buffer = ReplayBuffer(lambda: now[0])
    request = make_state("req-1", generation_of("generate", 1, 0))
    request.sequences[0].move(SequencePhase.FAILED)
    request.end(Outcome.FINISHED)
    buffer.put(request)
    first = buffer.find("req-1")
    assert first is buffer.find("req-1")
    now[0] = KEEP_S
    buffer.expire()
    assert (buffer.find("req-1"), len(buffer), buffer.bytes) == (None, 0, 0)


VOCABULARY = make_token_bytes()


class Life:
    """Requests from start to end, through journal, relay and recovery."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.generator = Generator()
        self.writer = StateWriter(Journal(directory, 1 << 20, lambda: 1e9 + self.now))
        self.relay = Relay(self._submit, lambda: self.now, lambda request: self.recovery.record_end(request))
        self.readers = Readers(self.relay, lambda: self.now)
        self.recovery = Recovery(self.relay, self.readers, self.writer, lambda: self.now, lambda: 1e9 + self.now, 300)
        self._number = 0
        self.relay.vocabularies["bytes"] = VOCABULARY

    def _submit(self, frame: Any) -> bool:
        self.generator.receive(frame)
        return True

    def live(self, end: str) -> None:
        """Run one request to its end. `end`: how it ends."""
        self._number += 1
        request = make_state(
            f"req-{self._number:x}",
            generation_of("generate", 2, 2),
            until=self.now + 300,
            tenant="mine",
            prompt=b"\1\0\0\0\2\0\0\0" * 50,
            max_tokens=8,
            sampling=Sampling(seed=self._number, logprobs=2),
        )
        reader = EventStream(request, GenerateFormatter(request, VOCABULARY), lambda reason: None)
        request.sink = reader
        written = threading.Event()
        self.recovery.record_start(request.spec, lambda is_written: written.set())
        assert written.wait(60)
        self.relay.open(request)
        self.step(1)
        if end == "abandoned":
            self.readers.leave(request, reader)
        elif end == "failed":
            self.relay.fail(request, StarlingError("INFERENCE", "no"))
        elif end == "taken over":
            other = FanOutSink()
            self.readers.join(request, other)
            self.readers.leave(request, reader)
            self.step(20)
            self.readers.leave(request, other)
        elif end == "scheduler lost":
            self.generator = Generator()
            self.relay.on_scheduler_up()
            self.step(20)
        self.step(20)
        self.readers.leave(request, reader)
        assert request.outcome is not Outcome.OPEN

    def step(self, tokens: int) -> None:
        for _ in range(3):
            self.generator.step(tokens)
            box, self.generator.outbox = self.generator.outbox, []
            for frame in box:
                self.relay.on_tokens(frame)
        self.generator.submitted.clear()
        self.generator.cancelled.clear()
        self.now += 0.01
        self.relay.tick()


ENDS = ("finished", "abandoned", "failed", "taken over", "scheduler lost")


def traced_bytes() -> int:
    """What the gateway's code has allocated and not freed. Threads that other tests have left may allocate, too."""
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, GATEWAY)])
    return sum(statistic.size for statistic in own.statistics("filename"))


def requests_and_readers() -> list[object]:
    """All objects of these kinds in this process."""
    kinds = RequestState | SequenceState | EventStream
    return [thing for thing in gc.get_objects() if isinstance(thing, kinds)]


async def test_thousands_of_requests_leave_no_objects(tmp_path: Path) -> None:
    """Not even cycles for the garbage collector, which rarely runs in a process with many long-lived objects."""
    life = Life(tmp_path)
    gc.collect()
    gc.disable()
    others = requests_and_readers()  # that tests before this one have left
    tracemalloc.start()
    try:
        traced = []
        for number in range(1600):
            life.live(ENDS[number % len(ENDS)])
            if number in (599, 1599):
                traced.append(traced_bytes())
        known = {id(thing) for thing in others}
        assert [thing for thing in requests_and_readers() if id(thing) not in known] == []
        assert len(life.recovery.replay_buffer) == MAX_ENDED
        assert traced[1] - traced[0] < 50_000, "bytes, after 1,000 requests more"
    finally:
        tracemalloc.stop()
        gc.enable()
        life.writer.close()


def test_the_journal_keeps_max_ended_requests_and_all_in_flight(tmp_path: Path) -> None:
    """At any rate of requests."""
    target = open_journal(tmp_path, max_bytes=400_000)
    assert target.open(make_journal_spec("req-first"))
    for number in range(3 * MAX_ENDED):
        assert target.open(make_journal_spec(f"req-{number}", b"12345678" * 10))
        target.end(RequestEnd(f"req-{number}", 1e9), is_kept=True)
        assert target.path.stat().st_size <= 400_000
    assert target.left_out == 0
    target.close()
    expected = {f"req-{number}" for number in range(2 * MAX_ENDED, 3 * MAX_ENDED)} | {"req-first"}
    assert set(recovered(tmp_path)) == expected


def test_ended_requests_make_room_for_those_in_flight(tmp_path: Path) -> None:
    target = open_journal(tmp_path, max_bytes=20_000)
    for number in range(50):
        assert target.open(make_journal_spec(f"req-{number}", b"12345678" * 100))
        target.end(RequestEnd(f"req-{number}", 1e9), is_kept=True)
    names = [f"req-now-{number}" for number in range(8)]
    assert all(target.open(make_journal_spec(name, b"12345678" * 100)) for name in names)
    assert target.left_out == 0
    target.close()
    assert set(recovered(tmp_path)) >= set(names)


def test_answers_of_a_tenant_make_room_before_those_of_tenants_with_few(tmp_path: Path) -> None:
    target = open_journal(tmp_path, 1 << 16, part_of=part_of)
    for tenant, names in (("quiet", ["", "k"]), ("busy", [f"k{number}" * (number % 2) for number in range(200)])):
        for number, key in enumerate(names):
            spec = spec_of(tenant, f"req-{tenant}-{number}")
            assert target.open(msgspec.structs.replace(spec, idempotency_key=key, body_digest=b"d" * 32))
            target.end(RequestEnd(spec.id, NOW), is_kept=True, is_pinned=bool(key))
    target.close()
    reader = open_journal(tmp_path)
    reader.close()
    found = [spec.id for spec, _ in reader.take_entries()]
    assert found[:2] == ["req-quiet-0", "req-quiet-1"]
    assert found[-1] == "req-busy-199"


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_ended_requests_of_busy_tenants_leave_those_of_a_quiet_one_in_the_journal(
    tmp_path: Path, is_rewritten: bool
) -> None:
    target = open_journal(tmp_path, 400_000 if is_rewritten else 1 << 22)
    tenants = ["quiet"] * 2 + ["first", "second"] * MAX_ENDED
    names = [f"req-{tenant}-{number}" for number, tenant in enumerate(tenants)]
    for tenant, name in zip(tenants, names, strict=True):
        assert target.open(msgspec.structs.replace(make_journal_spec(name), tenant=tenant))
        target.end(RequestEnd(name, NOW), is_kept=True)
    assert (target.path.stat().st_size <= 400_000) == is_rewritten
    target.close()
    reader = open_journal(tmp_path)
    reader.close()
    assert [spec.id for spec, _ in reader.take_entries()] == names[:2] + names[2 - MAX_ENDED :]


def test_damaged_records_are_not_copied_into_the_new_file(tmp_path: Path) -> None:
    """A damaged record of a request in flight is written again from memory."""
    target = open_journal(tmp_path, max_bytes=16_384)
    for name in ("req-a", "req-b", "req-c"):
        assert target.open(make_journal_spec(name, name.encode() * 4))
    target.end(RequestEnd("req-a", 1e9), is_kept=True)
    target.end(RequestEnd("req-c", 1e9), is_kept=True)
    raw = bytearray(target.path.read_bytes())
    for _, value, end in list(parse(bytes(raw))):
        if isinstance(value, RequestSpec) and value.id in ("req-b", "req-c"):
            raw[end - 5] ^= 1
    with target.path.open("r+b") as file:
        file.write(raw)
    size = target.path.stat().st_size
    while target.path.stat().st_size >= size:  # until the file has been rewritten
        size = target.path.stat().st_size
        assert target.open(make_journal_spec("req-d"))
        target.end(RequestEnd("req-d", 1e9, "ABANDONED"), is_kept=False)
    target.close()
    assert recovered(tmp_path) == {"req-a": RequestEnd("req-a", 1e9), "req-b": None}


@pytest.mark.parametrize("code", ["", "TIMEOUT"])
async def test_a_successor_returns_an_end_on_every_call(tmp_path: Path, code: str) -> None:
    life = Life(tmp_path)
    life.live("failed" if code else "finished")
    life.writer.close()
    again = Life(tmp_path)
    for _ in range(2):
        request = again.recovery.find("req-1", "mine")
        assert request is not None
        assert request.outcome is (Outcome.FAILED if code else Outcome.OPEN)
    again.writer.close()
