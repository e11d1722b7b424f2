"""The time of a step counts for the phase that it is in."""

from __future__ import annotations

from pathlib import Path

from pipeline.observe.metrics import Metrics, read_snapshot
from stages.scheduler.metrics import ModelMetrics

from .peers import submission
from .world import World

OUTPUTS = 20


def test_steps_of_prompts_and_of_outputs_are_counted_apart(tmp_path: Path) -> None:
    world = World()
    world.submit(submission("a", list(range(1, 41)), OUTPUTS))
    world.run_until_idle()
    stats = world.engine.stats
    numbers = {phase: steps.number for phase, steps in stats.step_s.items()}
    assert numbers["prefill"] >= 1
    assert numbers["decode"] >= OUTPUTS - 1  # the prompt's last step samples the first one
    assert numbers["draft"] == 0
    assert stats.worker_s == sum(steps.total for steps in stats.step_s.values()) > 0
    model = ModelMetrics("model")
    model.engines["model"] = world.engine
    model.remove("model")  # unloaded: its figures stay
    model.engines["model@2"] = world.engine
    metrics = Metrics("scheduler", tmp_path)
    model.export(metrics)
    metrics.publish()
    assert metrics.path is not None
    snapshot = read_snapshot(metrics.path)
    assert snapshot is not None
    exported = {series.labels: sum(series.counts) for series in snapshot.families["starling_step_seconds"]}
    assert exported == {("model", phase): 2 * number for phase, number in numbers.items() if number}
