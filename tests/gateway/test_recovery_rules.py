"""What a gateway does with the requests that it finds in the journal. The clock belongs to the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.api.requests import generate
from pipeline.config.load import resolve
from pipeline.errors import InvalidRequest, NotFound
from pipeline.models.versions import initial
from pipeline.protocol import messages as m
from stages.gateway.requests.event_cursor import ChoiceCursor, EventCursor
from stages.gateway.requests.journal import KEEP_S, MAX_ENDED, Journal
from stages.gateway.requests.readers import CLAIM_S, CatchUpWaiter, FanOutSink, Readers
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.resume import Resumer
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.state_writer import StateWriter
from stages.gateway.versions.catalog import VersionCatalog
from tests.gateway.peers import MODEL
from tests.gateway.request_states import DIGEST, make_state

BODY = b"d" * 32
DESCRIBED = {MODEL: m.Described("", MODEL, DIGEST, 258, 4096, (256,), True)}

_CONFIG = resolve({"models": [{"name": MODEL, "path": "model.gguf"}]}, {})
INSTANCES = VersionCatalog(_CONFIG, initial(_CONFIG), lambda version_table: None)


def revised(revision: int) -> dict[str, m.Described]:
    """The described versions: one of the same file, by a release that computes that K and V."""
    return {MODEL: m.Described("", MODEL, DIGEST, 258, 4096, (256,), True, kv_revision=revision)}


class World:
    """A gateway without sockets; `restart` replaces it by a successor with the same directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 0.0
        self.sent: list[m.Frame] = []
        self.writer = StateWriter(None)
        self.restart()

    def restart(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.sent.clear()
        self.writer.close()
        self.writer = StateWriter(Journal(self.directory, 1 << 20, lambda: 1e9 + self.now))
        self.relay = Relay(self._send, lambda: self.now, self._on_end)
        self.readers = Readers(self.relay, lambda: self.now)
        self.recovery = Recovery(
            self.relay, self.readers, self.writer, lambda: self.now, lambda: 1e9 + self.now, timeout_s=300
        )

    def _on_end(self, request: RequestState) -> None:
        self.readers.forget(request.id)
        self.recovery.record_end(request)

    def _send(self, frame: m.Frame) -> bool:
        self.sent.append(frame)
        return True

    def open(self, name: str = "req-1", model: str = MODEL, key: str = "", kv_revision: int = 0) -> RequestState:
        ask = generate.read({"prompt": [1, 2], "n": 2, "stream": True})
        request = make_state(
            name,
            ask,
            until=self.now + 300,
            model=model,
            tenant="mine",
            prompt=b"12345678",
            max_tokens=9,
            deadline=1e9 + self.now + 300,
            idempotency_key=key,
            body_digest=BODY,
            kv_revision=kv_revision,
        )
        request.sink = FanOutSink()
        self.recovery.record_start(request.spec)
        self.recovery.keys.run(request.spec)
        self.relay.open(request)
        return request

    async def tick(self, after_s: float = 0.0, described: Any = None) -> None:
        self.now += after_s
        self.relay.tick()
        self.recovery.tick(DESCRIBED if described is None else described, INSTANCES)
        self.readers.tick()

    def find(self, name: str = "req-1") -> RequestState:
        request = self.recovery.find(name, "mine")
        assert request is not None
        return request


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "journal")


async def test_an_answer_that_is_forgotten_takes_no_running_request_of_the_same_name(world: World) -> None:
    world.open()
    await world.recovery.forget("req-1", "other")
    await world.recovery.forget("req-1", "mine")
    world.restart()
    await world.tick()
    assert world.find().spec.id == "req-1"


async def test_a_successor_submits_what_its_predecessor_had_submitted(world: World) -> None:
    world.open()
    before = list(world.sent)
    world.restart(after_s=2)
    await world.tick(described={})
    assert world.sent == []
    await world.tick()
    for old, new in zip(before, world.sent, strict=True):
        assert isinstance(old, m.Submit)
        assert isinstance(new, m.Submit)
        assert (old.deadline_ms, new.deadline_ms) == (300_000, 298_000)
        assert m.Submit(*[getattr(old, f) for f in m.Submit.__struct_fields__]) == old
        assert not new.following, "if one is refused, the others go on"
        assert msgspec.structs.replace(new, deadline_ms=300_000, following=old.following) == old


async def test_a_request_whose_answer_would_differ_fails(world: World) -> None:
    world.open()
    world.open("req-2", "gone")
    world.restart()
    other = {MODEL: m.Described("", MODEL, "cd" * 32, 258, 4096, (256,), True)}
    waiter = CatchUpWaiter(world.find(), None)
    world.readers.join(world.find(), waiter)
    await world.tick(described=other)
    for name, code in (("req-1", "CONFLICT"), ("req-2", "MODEL_NOT_FOUND")):
        error = world.find(name).error
        assert error is not None
        assert error.code == code
    assert waiter.over.done()
    assert world.sent == []
    world.restart()  # the successor returns the recorded error
    error = world.find().error
    assert error is not None
    assert error.code == "CONFLICT"


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 2), (1, 0)])
async def test_a_request_of_another_revision_fails(world: World, before: int, now: int) -> None:
    """A release that computes another K and V continues no stream of one before it: its tokens would be mixed."""
    world.open(kv_revision=before, key="k")
    world.restart()
    waiter = CatchUpWaiter(world.find(), None)
    world.readers.join(world.find(), waiter)
    await world.tick(described=revised(now))
    error = world.find().error
    assert (error and error.code, waiter.over.done(), world.sent) == ("CONFLICT", True, [])
    assert not world.recovery.keys.holds("mine", "k")  # so that its client can send it again
    world.restart()
    error = world.find().error
    assert error and error.code == "CONFLICT"


async def test_an_answered_request_of_another_revision_is_not_generated_again(world: World) -> None:
    world.relay.complete(world.open(key="k", kv_revision=1))
    world.restart()
    assert world.find().outcome is Outcome.OPEN
    await world.tick(described=revised(2))
    error = world.find().error
    assert (error and error.code, world.sent) == ("CONFLICT", [])
    assert not world.recovery.keys.holds("mine", "k")


@pytest.mark.parametrize("revision", [0, 1])
async def test_a_request_of_the_same_revision_is_submitted_again(world: World, revision: int) -> None:
    """0: as in a record of a release before the field, of a model whose computation has not changed."""
    world.open(kv_revision=revision)
    n_sent = len(world.sent)
    world.restart()
    await world.tick(described=revised(revision))
    assert (len(world.sent), world.find().error) == (n_sent, None)


async def test_a_request_past_its_deadline_is_not_submitted(world: World) -> None:
    world.open()
    world.restart(after_s=301)
    await world.tick()
    error = world.find().error
    assert error is not None
    assert error.code == "TIMEOUT"
    assert world.sent == []


async def test_a_recovered_request_without_a_reader_is_cancelled(world: World) -> None:
    world.open()
    world.restart()
    await world.tick()
    await world.tick(CLAIM_S - 1)
    request = world.find()
    waiter = CatchUpWaiter(request, None)
    world.readers.join(request, waiter)
    await world.tick(CLAIM_S)
    assert request.outcome is Outcome.OPEN
    world.readers.leave(request, waiter)  # the client disconnects again
    await world.tick(CLAIM_S - 1)
    assert request.outcome is Outcome.OPEN
    await world.tick(1)
    assert request.outcome is Outcome.ABANDONED
    assert sum(isinstance(frame, m.Cancel) for frame in world.sent) == 2
    assert world.recovery.find("req-1", "mine") is None
    world.restart()
    assert world.recovery.find("req-1", "mine") is None


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_a_recovered_request_that_is_cancelled_is_computed_by_no_successor(
    world: World, is_waiting: bool
) -> None:
    world.open()
    world.restart()
    await world.tick(described={} if is_waiting else None)
    waiter = CatchUpWaiter(world.find(), None)
    world.readers.join(world.find(), waiter)
    world.recovery.cancel(world.find(), _error())
    assert waiter.over.done()
    for _ in range(2):
        await world.tick()
        assert world.recovery.find_open("req-1") is None
        found = world.find().error
        assert found is not None and found.message == _error().message
        assert is_waiting == (not any(isinstance(frame, m.Submit) for frame in world.sent))
        world.restart()
        is_waiting = True  # nothing is submitted any more


async def test_ended_requests_expire_and_are_bounded_in_number(world: World) -> None:
    for number in range(MAX_ENDED + 5):
        request = world.open(f"req-{number}")
        request.sink = None
        world.relay.fail(request, _error())
    assert world.recovery.find("req-4", "mine") is None
    assert world.find("req-5").outcome is Outcome.FAILED
    await world.tick(KEEP_S)
    assert world.recovery.find("req-5", "mine") is None


async def test_a_disconnect_cancels_a_request_that_was_not_recovered(world: World) -> None:
    request = world.open()
    request.sink = waiter = CatchUpWaiter(request, None)
    world.readers.leave(request, waiter)
    assert request.outcome is Outcome.ABANDONED


# ------------------------------------------------------------------ answers that are generated again


def answered(world: World, key: str) -> None:
    """Answer a request, and restart the gateway 10 s later: its answer is dormant."""
    world.relay.complete(world.open(key=key))
    world.restart(after_s=10)


def is_kept(world: World, key: str) -> bool:
    """Whether the answer can be had, and the key names it."""
    names = not key or world.recovery.keys.holds("mine", key)
    return names and world.recovery.spec_of("req-1", "mine") is not None


async def leave(world: World) -> None:
    """A reader comes, and leaves before the answer is there."""
    request = world.find()
    waiter = CatchUpWaiter(request, None)
    world.readers.join(request, waiter)
    await world.tick()
    world.readers.leave(request, waiter)
    assert request.outcome is Outcome.OPEN
    await world.tick(CLAIM_S)
    assert request.outcome is Outcome.ABANDONED


async def fail(world: World) -> None:
    request = world.find()
    await world.tick()
    world.relay.fail(request, _error())


async def time_out(world: World) -> None:
    """No version of its model comes in time."""
    request = world.find()
    request.deadline = world.now
    await world.tick(described={})
    assert request.outcome is Outcome.FAILED


async def cancel(world: World) -> None:
    request = world.find()
    world.recovery.cancel(request, _error())
    assert request.outcome is Outcome.FAILED


@pytest.mark.parametrize("key", ["k", ""])
@pytest.mark.parametrize("end", [leave, fail, time_out, cancel])
async def test_an_answer_that_is_not_generated_again_is_kept_as_before(
    world: World, end: Callable[[World], Awaitable[None]], key: str
) -> None:
    answered(world, key)
    await end(world)
    assert is_kept(world, key)
    world.restart()
    assert is_kept(world, key)
    assert not world.recovery.has_waiting
    request = world.find()
    await world.tick()
    world.relay.complete(request)
    assert world.find().outcome is Outcome.FINISHED
    world.restart()
    assert is_kept(world, key)
    world.restart(after_s=KEEP_S + 1)
    await world.tick()
    assert not is_kept(world, "") and not len(world.recovery.keys)


async def test_an_answer_that_fails_to_be_generated_again_is_not_kept_for_longer(world: World) -> None:
    answered(world, "k")
    await world.tick(KEEP_S - 11)
    request = world.find()
    await world.tick(2)
    assert request.outcome is Outcome.OPEN
    world.relay.fail(request, _error())
    assert not world.recovery.keys.holds("mine", "k")
    assert not world.recovery._dormant
    assert world.recovery.spec_of("req-1", "mine") is None
    world.restart()
    assert world.recovery.spec_of("req-1", "mine") is None


class Ends:
    """A reader that counts the ends that it is sent."""

    def __init__(self) -> None:
        self.ends = 0

    def finished(self) -> None:
        self.ends += 1

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("has_left", [False, True])
async def test_the_end_of_an_answer_with_a_key_is_sent_once_the_journal_has_it(world: World, has_left: bool) -> None:
    may_write = threading.Event()
    request = world.open(key="k")
    world.writer._put(may_write.wait)
    world.relay.send_end = world.recovery.send_end
    first, second, late = Ends(), Ends(), Ends()
    sinks: list[Any] = [first, second, late]
    for reader in sinks[:2]:
        world.readers.join(request, reader)
    world.relay.complete(request)
    world.readers.join(request, sinks[2])  # it is sent the whole answer when it joins
    if has_left:
        world.readers.leave(request, sinks[1])
    await asyncio.sleep(0)
    assert (first.ends, second.ends) == (0, 0)
    may_write.set()
    while not first.ends:
        await asyncio.sleep(0)
    assert (first.ends, second.ends, late.ends) == (1, not has_left, 0)
    (entry,) = Journal(world.directory, 1 << 20, lambda: 1e9).take_entries()
    assert entry.end is not None and not entry.end.code


async def test_the_end_of_an_answer_without_a_key_is_sent_at_once(world: World) -> None:
    request = world.open()
    world.relay.send_end = world.recovery.send_end
    sink: Any = Ends()
    world.readers.join(request, sink)
    world.relay.complete(request)
    assert sink.ends == 1


async def test_a_gateway_that_dies_while_an_answer_is_generated_again_keeps_its_key(world: World) -> None:
    answered(world, "k")
    world.find()
    await world.tick()
    world.restart()
    await world.tick()
    await world.tick(CLAIM_S)
    assert is_kept(world, "k")


async def test_an_answer_that_no_loaded_version_gives_frees_its_key(world: World) -> None:
    answered(world, "k")
    other = {MODEL: m.Described("", MODEL, "cd" * 32, 258, 4096, (256,), True)}
    world.find()
    for _ in range(2):
        await world.tick(described=other)
        error = world.find().error
        assert error is not None and error.code == "CONFLICT"
        assert not world.recovery.keys.holds("mine", "k")
        world.restart()


@pytest.mark.parametrize("is_dormant", [True, False])
async def test_a_read_that_is_refused_generates_nothing(world: World, is_dormant: bool) -> None:
    if is_dormant:
        answered(world, "k")
    else:
        world.relay.complete(world.open(key="k"))
    resumer = Resumer(world.recovery, world.readers, {})
    one_place = EventCursor("req-1", (ChoiceCursor(1),))
    seen: list[RequestSpec] = []

    def refuse(spec: RequestSpec) -> None:
        seen.append(spec)
        raise InvalidRequest("no", "stream")

    with pytest.raises(InvalidRequest, match="1 places and the request 2 choices"):
        resumer.find("req-1", "mine", one_place)
    with pytest.raises(InvalidRequest, match="1 places and the request 2 choices"):
        resumer.spec_of("req-1", "mine", one_place)
    with pytest.raises(InvalidRequest, match="no"):
        resumer.find("req-1", "mine", None, refuse)
    for read in (resumer.find, resumer.spec_of):
        with pytest.raises(NotFound):
            read("req-1", "other")
        with pytest.raises(NotFound):
            read("req-2", "mine")
    assert [spec.id for spec in seen] == [resumer.spec_of("req-1", "mine").id] == ["req-1"]
    assert not world.recovery.has_waiting
    assert resumer.find("req-1", "mine").id == "req-1"
    assert world.recovery.has_waiting == is_dormant


def _error() -> Any:
    from pipeline.errors import StarlingError

    return StarlingError("INFERENCE", "no")
