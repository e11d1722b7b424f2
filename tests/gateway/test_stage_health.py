"""A stage is unready without progress, without heartbeats or on its own report, but not during long work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.errors import ModelUnavailable
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol.messages import Heartbeat, ModelState
from pipeline.runtime.timer_coalescing import ALIGN_S
from stages.gateway.admission.server_readiness import ChangeSignal, ServerReadiness
from stages.gateway.admission.stage_health import STUCK_S, StageHealth


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def beat(progress: int, busy: bool = True, ready: bool = True, reason: str = "", epoch: int = 1) -> Heartbeat:
    return Heartbeat("kv", epoch, progress, busy, ready, reason)


def test_a_stage_is_ready_from_its_first_good_heartbeat() -> None:
    health = StageHealth("kv", Clock())
    assert health.problem == "not started yet"
    health.up()
    assert health.problem == "no heartbeat yet"
    health.observe(beat(0, ready=False, reason="mapping"))
    assert health.problem == "mapping"
    health.observe(beat(1))
    assert health.problem == ""
    health.down()
    assert health.problem == "not running"
    assert health.report() == {"ready": False, "reason": "not running"}


def test_work_without_progress_makes_unready_and_progress_clears_it() -> None:
    clock = Clock()
    health = StageHealth("kv", clock)
    health.up()
    for _ in range(20):
        health.observe(beat(7))
        clock.now += 0.1
    assert "no progress for" in health.problem
    health.observe(beat(8))
    assert health.problem == ""


def test_long_work_with_progress_and_idleness_stay_ready() -> None:
    clock = Clock()
    health = StageHealth("kv", clock)
    health.up()
    for progress in range(100):
        health.observe(beat(progress))
        clock.now += 0.9 * STUCK_S
        assert health.problem == ""
    for _ in range(100):
        health.observe(beat(99, busy=False))
        clock.now += 0.3
        assert health.problem == ""
    # An idle stage that has just received work is not stuck.
    health.observe(beat(99, busy=True))
    assert health.problem == ""


def test_a_successor_with_the_same_counter_is_not_stuck() -> None:
    clock = Clock()
    health = StageHealth("kv", clock)
    health.up()
    health.observe(beat(3, epoch=1))
    clock.now += 5
    health.observe(beat(3, epoch=2))
    assert health.problem == ""


def test_silence_makes_an_idle_stage_unready() -> None:
    clock = Clock()
    health = StageHealth("kv", clock)
    health.up()
    last = beat(3, busy=False)
    for _ in range(7):
        health.observe(last)
        assert health.problem == ""
        clock.now += 0.1
    for _ in range(2):
        clock.now += 0.1
        health.observe(last)
    assert "silent for" in health.problem
    health.observe(beat(3, busy=False))
    assert health.problem == ""


def test_missing_progress_is_detected_within_a_second() -> None:
    """Worst case: the last progress was just after a heartbeat, and the second heartbeat after it is late."""
    clock = Clock()
    health = StageHealth("kv", clock, 0.25)
    health.up()
    health.observe(beat(1))
    stood = clock.now
    clock.now += 0.3
    health.observe(beat(2))
    while not health.problem:
        clock.now += 0.1
        health.observe(beat(2))
    assert clock.now - stood <= 1.0 + 1e-9


def test_the_silence_of_an_idle_stage_is_detected_within_a_second() -> None:
    clock = Clock()
    health = StageHealth("kv", clock, 0.25)
    health.up()
    for _ in range(20):
        health.observe(msgspec.structs.replace(beat(1, busy=False), idle=True))
        clock.now += 1.5 * ALIGN_S  # late by half a beat
        assert health.problem == ""
    silent = msgspec.structs.replace(beat(1, busy=False), idle=True)
    health.observe(silent)
    received = clock.now
    while not health.problem:
        clock.now += ALIGN_S  # the gateway checks as rarely
        assert clock.now - received <= 1.0 + 1e-9
        health.observe(silent)


def test_time_in_which_the_gateway_was_suspended_does_not_count() -> None:
    clock = Clock()
    health = StageHealth("kv", clock)
    health.up()
    health.observe(beat(1))
    clock.now += 60
    assert health.problem == "", "a request may be handled before the heartbeats that came meanwhile"
    health.observe(beat(1))
    assert health.problem == ""


def test_a_long_heartbeat_interval_is_respected() -> None:
    clock = Clock()
    health = StageHealth("kv", clock, heartbeat_s=2.0)
    health.up()
    last = beat(1, busy=False)
    for _ in range(55):
        health.observe(last)
        clock.now += 0.1
    assert health.problem == ""


@given(st.lists(st.floats(0.001, 1.125 * ALIGN_S), max_size=20), st.floats(0, ALIGN_S))
def test_a_heartbeat_counts_from_its_arrival(gaps: list[float], until_tick: float) -> None:
    """An idle gateway ticks as rarely as an idle stage sends, at any distance from the heartbeats."""
    clock = Clock()
    none: Any = None  # `observe` needs no models
    readiness = ServerReadiness(Config(), none, none, ChangeSignal(), clock)
    health = readiness.kv
    health.up()
    last = msgspec.structs.replace(beat(1, busy=False), idle=True)
    readiness.on_heartbeat(health, last)
    next_tick = clock.now + until_tick
    for gap in gaps:
        arrival = clock.now + gap
        while next_tick < arrival:
            clock.now = next_tick
            readiness.observe(None, None, last)
            assert health.problem == ""
            next_tick += ALIGN_S
        clock.now = arrival
        assert health.problem == ""
        last = msgspec.structs.replace(last)
        readiness.on_heartbeat(health, last)


def test_a_model_with_several_worker_groups_shows_each(tmp_path: Path) -> None:
    """It is ready while one of them is; a group that cannot start has recorded the reason."""
    version = ModelVersion(name="m", serial=0, settings=ModelConfig(name="m", path="/m.gguf"), state="serving")
    config = msgspec.structs.replace(Config(), server=ServerConfig(run_dir=str(tmp_path)))
    catalog = SimpleNamespace(
        names=["m"], serving=lambda name: version, versions=lambda name: (version,), known_names=lambda: ["m"]
    )
    state = ModelState("m", "aa" * 32, True, "", 0, 0, 8, groups=("", "waiting for its worker", "stalled"))
    loaded = SimpleNamespace(states={"m": state}, described={"m": None})
    readiness = ServerReadiness(config, cast(Any, catalog), cast(Any, loaded), ChangeSignal(), Clock())
    versions.write_failure(tmp_path, "worker-m~1", ModelUnavailable("too little memory"))
    model = readiness.report(0)["models"]["m"]
    assert model["ready"]
    assert [(group["stage"], group["ready"], group["reason"]) for group in model["worker_groups"]] == [
        ("worker-m", True, None),
        ("worker-m~1", False, "its worker cannot start: too little memory"),
        ("worker-m~2", False, "stalled"),
    ]
    loaded.states["m"] = msgspec.structs.replace(state, groups=())
    assert "worker_groups" not in readiness.report(0)["models"]["m"]


def test_a_full_queue_shows_at_its_model_and_all_of_them_at_the_server() -> None:
    """Of one tenant: in the queue of several those with fewer sequences get a place."""
    tables = {
        name: ModelVersion(name=name, serial=0, settings=ModelConfig(name=name, path=f"/{name}"), state="serving")
        for name in ("a", "b")
    }
    catalog = SimpleNamespace(
        names=list(tables), serving=tables.get, versions=lambda name: (tables[name],), known_names=lambda: list(tables)
    )
    states = {one.id: ModelState(name, "aa" * 32, True, "", 0, 0, 8) for name, one in tables.items()}
    loaded = SimpleNamespace(states=states, described=states)
    readiness = ServerReadiness(Config(), cast(Any, catalog), cast(Any, loaded), ChangeSignal(), Clock())
    for health in (readiness.tokenizer, readiness.scheduler, readiness.kv):
        health.up()
        health.observe(beat(1, busy=False))

    def report(**waiting: int) -> tuple[bool, list[bool], list[bool]]:
        for name, count in waiting.items():
            states[tables[name].id] = msgspec.structs.replace(states[tables[name].id], waiting=count)
        found = readiness.report(0)
        models = found["models"].values()
        assert all(one["ready"] for one in models), "requests do not wait for a model with a full queue"
        return found["ready"], [one["overloaded"] for one in models], [found["reason"] is not None]

    assert report(a=999) == (True, [False, False], [False])
    assert report(a=1000) == (True, [True, False], [False])
    assert report(b=1001) == (False, [True, True], [True])
    assert report(a=901) == (False, [True, True], [True]), "until a tenth is free"
    readiness.has_one_tenant = lambda: False
    assert report() == (True, [True, True], [False])
    readiness.has_one_tenant = lambda: True
    assert report(a=900) == (True, [False, True], [False])
    assert report(a=999) == (True, [False, True], [False])
    catalog.known_names = lambda: ["a", "b", "c"]  # which a request loads
    assert report(a=1000) == (True, [True, True], [False])


def test_a_server_stays_overloaded_until_a_tenth_of_its_requests_has_ended(tmp_path: Path) -> None:
    config = msgspec.structs.replace(Config(), server=ServerConfig(max_concurrent_requests=50))
    nothing = SimpleNamespace(names=["a"], serving=lambda name: None, known_names=lambda: ["a"], states={})
    readiness = ServerReadiness(config, cast(Any, nothing), cast(Any, nothing), ChangeSignal(), Clock())

    def is_ready(in_flight: int) -> bool:
        ready: bool = readiness.report(in_flight)["stages"]["gateway"]["ready"]
        return ready

    assert [is_ready(count) for count in (49, 50, 49, 46, 45, 49)] == [True, False, False, False, True, True]


def test_models_are_described_as_soon_as_the_tokenizer_is_ready() -> None:
    class Loaded:
        asked = 0

        def describe_missing(self) -> None:
            self.asked += 1

    loaded: Any = Loaded()
    none: Any = None
    readiness = ServerReadiness(Config(), none, loaded, ChangeSignal(), Clock())
    for health in (readiness.kv, readiness.tokenizer):
        health.up()
        readiness.on_heartbeat(health, msgspec.structs.replace(beat(1), ready=False))
    assert loaded.asked == 0
    readiness.on_heartbeat(readiness.kv, beat(2))
    assert loaded.asked == 0
    readiness.on_heartbeat(readiness.tokenizer, beat(2))
    assert loaded.asked == 1
