"""The scheduler's stage says that it is not ready as soon as it cannot compute: not only at the next tick."""

from __future__ import annotations

import tempfile
from collections import deque

import pytest

from pipeline.config.load import resolve
from pipeline.protocol.messages import Hello, KvReady, SchedulerState
from pipeline.runtime.stage_runtime import TICK_S
from stages.scheduler.core.group_runner import REATTACH_S
from stages.scheduler.stage import SchedulerStage

from .worker_processes import DIGEST, Group

MODEL = {"name": "m", "path": "/model.gguf"}


@pytest.mark.parametrize("lost", ["worker", "kv"])
def test_a_lost_peer_ends_the_readiness_at_once(lost: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the paths of sockets are short
        server = {name: f"{folder}/{name}" for name in ("run_dir", "arena_dir", "state_dir")}
        check(SchedulerStage(resolve({"models": [MODEL], "server": server}, {})), lost)


def test_a_group_that_is_attached_anew_between_two_looks_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test counts only for the attachment that answered it: gateways must learn of the next one at once."""
    group = Group(1)
    with tempfile.TemporaryDirectory() as folder:
        server = {name: f"{folder}/{name}" for name in ("run_dir", "arena_dir", "state_dir")}
        stage = SchedulerStage(resolve({"models": [MODEL], "server": server}, {}))
        pushed: list[tuple[int, ...]] = []
        (runner,) = stage.runners.values()
        monkeypatch.setattr(runner.groups[0], "_to_worker", lambda peer, frame: True)
        monkeypatch.setattr(stage, "_push_state", lambda peers: pushed.append(runner.state().attachments))
        try:
            runner.worker_ready(b"w", group.hello, group.ready, 0.0)
            runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
            for _ in range(2):
                stage._update_readiness(0.0)
            (first,) = pushed
            runner.worker_ready(b"w", group.hello, group.ready, 2 * REATTACH_S)
            stage._update_readiness(0.0)  # before the next push is due
            assert len(first) == 1
            assert pushed == [first, runner.state().attachments]
            assert runner.state().attachments > first
        finally:
            group.end()
            stage.loop.quit(0)
            stage.run()


@pytest.mark.parametrize("lost", ["worker", "kv"])
def test_ticks_are_rare_only_while_nothing_waits_for_them(lost: str) -> None:
    group = Group(1)
    with tempfile.TemporaryDirectory() as folder:
        server = {name: f"{folder}/{name}" for name in ("run_dir", "arena_dir", "state_dir")}
        stage = SchedulerStage(resolve({"models": [MODEL], "server": server}, {}))
        (runner,) = stage.runners.values()
        runner.groups[0]._to_worker = lambda peer, frame: True  # type: ignore[method-assign]
        try:
            stage._update_readiness(0.0)
            assert not stage.loop.is_steady, "no worker is attached"
            runner.worker_ready(b"w", group.hello, group.ready, 0.0)
            runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
            stage._update_readiness(0.0)
            assert stage.loop.is_steady
            stage._unsent[b"g"] = deque([SchedulerState([])])
            stage._update_readiness(0.0)
            assert not stage.loop.is_steady, "frames wait for a tick"
            stage._unsent.clear()
            runner.groups[0].stalled_s = 0.3
            stage._update_readiness(0.0)
            assert not stage.loop.is_steady, "ticks observe whether the worker computes"
            runner.groups[0].stalled_s = 0.0
            stage._update_readiness(0.0)
            stage.loop.ready = True
            stage.loop.tick()
            assert stage.loop.is_steady
            if lost == "worker":
                stage._worker_down(b"w", group.hello)
            else:
                stage._kv_down()
            assert not stage.loop.is_steady
            assert stage.loop._next_tick - stage.loop.clock() <= TICK_S, "the tick that continues the recovery"
        finally:
            group.end()
            stage.loop.quit(0)
            stage.run()


def check(stage: SchedulerStage, lost: str) -> None:
    try:
        stage.loop.ready = True  # as the last tick has found it
        if lost == "worker":
            assert stage.workers.on_down is not None
            stage.workers.on_down(b"worker", Hello("worker", 1, 1, 1))
        else:
            assert stage.kv.on_down is not None
            stage.kv.on_down(Hello("kv", 1, 1, 1))
        assert not stage.loop.ready
        assert stage.loop.reason.startswith("m")
    finally:
        stage.loop.quit(0)
        stage.run()
