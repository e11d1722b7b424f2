"""The scheduler's stage says that it is not ready as soon as it cannot compute: not only at the next tick."""

from __future__ import annotations

import tempfile

import pytest

from pipeline.config.load import resolve
from pipeline.protocol.messages import Hello
from stages.scheduler.stage import SchedulerStage

MODEL = {"name": "m", "path": "/model.gguf"}


@pytest.mark.parametrize("lost", ["worker", "kv"])
def test_a_lost_peer_ends_the_readiness_at_once(lost: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the paths of sockets are short
        server = {name: f"{folder}/{name}" for name in ("run_dir", "arena_dir", "state_dir")}
        check(SchedulerStage(resolve({"models": [MODEL], "server": server}, {})), lost)


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
