"""What the gateway records of the scheduler's events, whatever their frames' delays and the scheduler's clock."""

from __future__ import annotations

import pytest

from pipeline.config.schema import TracingConfig
from pipeline.errors import NotFound
from pipeline.protocol import messages as m
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.tracing.recorder import Recorder
from tests.gateway.peers import MODEL
from tests.gateway.request_states import make_state


class World:
    """A recorder with a clock of its own, and one request."""

    def __init__(self, is_remote: bool, behind_s: float = 0.0) -> None:
        """`behind_s`: of the scheduler's clock."""
        self.now = 1000.0
        self.behind_s = behind_s
        self.recorder = Recorder(TracingConfig(), lambda: self.now, lambda: self.now + 1e9, is_remote=is_remote)

    def begin(self, name: str = "req-1") -> RequestState:
        request = make_state(name)
        trace = self.recorder.begin(name, self.now, tenant="t", model=MODEL, client_id=f"client-{name}")
        self.recorder.attach(request, trace)
        return request

    def receive(self, request: RequestState, delay_s: float, *events: tuple[str, float]) -> None:
        """A frame that is made now, with events of some time ago, and arrives after `delay_s`."""
        made = self.now - self.behind_s
        sent = tuple(m.SequenceEvent(f"{request.id}/0", name, made - ago, 0, {"ms": 1.0}) for name, ago in events)
        self.now += delay_s
        self.recorder.on_frame(m.Tokens(MODEL, 1, [], events=sent, at=made), lambda _: request)


@pytest.mark.parametrize(("is_remote", "behind_s"), [(False, 0.0), (True, 0.0), (True, 500.0), (True, -500.0)])
def test_events_keep_the_schedulers_order(is_remote: bool, behind_s: float) -> None:
    """A frame that was delayed must not put its events after those of the next one."""
    world = World(is_remote, behind_s)
    request = world.begin()
    world.receive(request, 0.5, ("queued", 0.1), ("admitted", 0.0))
    world.receive(request, 0.001, ("prefill", 0.2))
    world.receive(request, 0.001, ("preempted", 0.0))
    found = world.recorder.find("req-1")
    names = [event["event"] for event in found["events"] if event["stage"] == "scheduler"]
    assert names == ["queued", "admitted", "prefill", "preempted"]
    assert all(0 <= event["at_ms"] <= 502.001 for event in found["events"])


@pytest.mark.parametrize("back", ["started", "prefill", "scheduler"])
def test_what_the_scheduler_does_without_a_worker_ends_no_recovery(back: str) -> None:
    """Pages are granted and finished steps are read while the worker is gone: nothing is computed until it is back."""
    world = World(is_remote=False)
    request = world.begin()

    def receive(name: str, pid: int = 0, *, sequence: str = f"{request.id}/0") -> None:
        facts: dict[str, int | float | str] = {"samples": 1} if name == "prefill" else {}
        event = m.SequenceEvent(sequence, name, world.now, pid, facts)
        frame = m.Tokens(request.spec.version, 1, [], events=(event,), at=world.now)
        world.recorder.on_frame(frame, lambda _: request)

    receive("queued")
    world.now += 1.0
    receive("lost", 7, sequence="")
    world.now += 2.0
    receive("prefill", 7)  # a step that the lost worker had finished
    receive("admitted")
    world.now += 3.0
    if back == "started":
        receive("started", 8, sequence="")
    elif back == "prefill":  # the event before it was lost
        receive("prefill", 8)
    else:  # a new scheduler computes it anew, with any worker
        world.recorder.stage_down("scheduler", m.Hello("scheduler", 1, 5, 1))
        receive("queued")
    world.now += 4.0
    phases = world.recorder.find("req-1")["phases_ms"]
    assert phases["recovery"] == 5000
    assert sum(phases.values()) == 10_000
    assert phases["queue"] == (5000 if back == "scheduler" else 1000)


def test_the_timeline_ends_with_the_last_response() -> None:
    world = World(is_remote=False)
    request = world.begin()
    with world.recorder.responding(request):
        world.now += 2.0
        request.end(Outcome.FINISHED)
        world.recorder.ended(request)
        world.now += 3.0
        assert world.recorder.find("req-1")["duration_ms"] == 5000
    world.now += 100.0
    found = world.recorder.find("client-req-1")
    assert (found["duration_ms"], found["phases_ms"]["write"]) == (5000, 3000)
    assert found["events"][-1]["event"] == "written"


def test_a_refused_request_leaves_nothing() -> None:
    world = World(is_remote=False)
    trace = world.recorder.begin("req-1", world.now, tenant="t", model=MODEL, client_id="")
    world.recorder.withdraw(trace)
    with pytest.raises(NotFound, match=r"tracing\.buffer_mb"):
        world.recorder.find("req-1")


def test_nothing_is_recorded_when_it_is_off() -> None:
    recorder = Recorder(TracingConfig(buffer_mb=0, slow_request_ms=0), lambda: 0.0, lambda: 0.0)
    assert recorder.begin("req-1", 0.0, tenant="t", model=MODEL, client_id="") is None


def test_slow_requests_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World(is_remote=False)
    for name, seconds in [("req-quick", 59.0), ("req-slow", 60.0)]:
        request = world.begin(name)
        world.now += seconds
        request.end(Outcome.FAILED)
        world.recorder.ended(request)
    (line,) = [record for record in caplog.records if record.message == "slow request"]
    assert (line.request_id, line.duration_ms, line.admission_ms) == ("req-slow", 60_000, 60_000)  # type: ignore[attr-defined]
