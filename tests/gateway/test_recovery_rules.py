"""What a gateway does with the requests that it finds in the journal. The clock belongs to the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.api.requests import generate
from pipeline.config.load import resolve
from pipeline.models.versions import initial
from pipeline.protocol import messages as m
from stages.gateway.requests.journal import KEEP_S, MAX_ENDED, Journal
from stages.gateway.requests.readers import CLAIM_S, CatchUpWaiter, FanOutSink, Readers
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.state_writer import StateWriter
from stages.gateway.versions.catalog import VersionCatalog
from tests.gateway.peers import MODEL
from tests.gateway.request_states import DIGEST, make_state

DESCRIBED = {MODEL: m.Described("", MODEL, DIGEST, 258, 4096, (256,), True)}

_CONFIG = resolve({"models": [{"name": MODEL, "path": "model.gguf"}]}, {})
INSTANCES = VersionCatalog(_CONFIG, initial(_CONFIG), lambda version_table: None)


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

    def open(self, name: str = "req-1", model: str = MODEL) -> RequestState:
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
        )
        request.sink = FanOutSink()
        self.recovery.record_start(request.spec)
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
        assert {f: getattr(new, f) for f in m.Submit.__struct_fields__ if f != "deadline_ms"} == {
            f: getattr(old, f) for f in m.Submit.__struct_fields__ if f != "deadline_ms"
        }


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


def _error() -> Any:
    from pipeline.errors import StarlingError

    return StarlingError("INFERENCE", "no")
