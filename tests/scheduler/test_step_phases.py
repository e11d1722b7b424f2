"""The time of a step counts for the phase that it is in."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.schema import MAX_DRAFT_TOKENS
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


def test_tokens_of_steps_and_accepted_drafts_are_counted(tmp_path: Path) -> None:
    """Every position that is computed is in a step, and every accepted draft token in a verification."""
    world = World(period=6, speculate=4)
    world.submit(submission("a", list(range(1, 41)), 3 * OUTPUTS))
    model = ModelMetrics("model")
    model.engines["model"] = world.engine
    metrics = Metrics("scheduler", tmp_path)
    model.export(metrics)
    world.run_until_idle()
    model.export(metrics)
    stats = world.engine.stats
    families = metrics.snapshot().families
    (steps,) = families["starling_step_tokens"]
    assert sum(steps.counts) == stats.steps
    assert steps.value >= 40 + 3 * OUTPUTS - 1 - stats.accepted  # a verification computes its drafts in one step
    (verified,) = families["starling_draft_accepted_tokens"]
    assert verified.value == stats.accepted > 0
    assert sum(number * count for number, count in enumerate(verified.counts)) == stats.accepted
    assert len(verified.counts) == MAX_DRAFT_TOKENS + 1
    (rate,) = families["starling_prompt_tokens_per_second"]
    assert rate.value > 0
    (deferred,) = families["starling_deferred_sequences"]
    assert deferred.value == 0


def test_a_sequence_that_waits_for_pages_is_deferred(tmp_path: Path) -> None:
    world = World()
    world.submit(submission("a", list(range(1, 41)), OUTPUTS))
    model = ModelMetrics("model")
    model.engines["model"] = world.engine
    metrics = Metrics("scheduler", tmp_path)

    def exported(name: str) -> float:
        model.export(metrics)
        (series,) = metrics.snapshot().families[f"starling_{name}"]
        return series.value

    assert (exported("queue_depth"), exported("deferred_sequences"), exported("running_sequences")) == (1, 0, 0)
    world.run_round()  # it has a row now, and kv has not answered
    assert (exported("queue_depth"), exported("deferred_sequences"), exported("running_sequences")) == (0, 1, 0)
    world.run_until_idle()
    assert (exported("queue_depth"), exported("deferred_sequences"), exported("running_sequences")) == (0, 0, 0)


def test_no_counter_of_the_scheduler_goes_back_while_drafts_are_verified(tmp_path: Path) -> None:
    world = World(period=6, speculate=4)
    world.submit(submission("a", list(range(1, 41)), 3 * OUTPUTS))
    model = ModelMetrics("model")
    model.engines["model"] = world.engine
    metrics = Metrics("scheduler", tmp_path)
    before: dict[tuple[str, tuple[str, ...]], float] = {}
    while "a" not in world.ends:
        for advance in (world.run_round, world.exchange_with_kv, world.compute_step, world.run_round, world.collect):
            advance()
            model.export(metrics)
            counters = {
                (name, tuple(one.labels)): one.value
                for name, series in metrics.snapshot().families.items()
                if name.endswith("_total")
                for one in series
            }
            assert all(counters[key] >= value for key, value in before.items())
            before = counters
    assert world.engine.stats.accepted > 0
