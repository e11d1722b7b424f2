"""Rounds over models on the same cores, with models that always have a step to compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stages.scheduler.core.rounds import Rounds
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.version_runner import VersionRunner
from stages.scheduler.draft.pairing import DraftPairs
from stages.scheduler.policy.core_sharing import Claim

STEP_S = 0.05


class Model:
    """As much of a `VersionRunner` as a round uses. A step takes `step_s` of its cores; without any, of all of them."""

    def __init__(self, name: str, cores: frozenset[int] = frozenset(), step_s: float = STEP_S) -> None:
        self.name = name
        self.cores = cores
        self.step_s = step_s
        self.is_wanting = self.is_computing = False
        self.lacks_pages = False
        self.spent_s = 0.0
        self.has_step_everywhere = False
        self.engine = SimpleNamespace(steps=SimpleNamespace(pacing=SimpleNamespace(depth=2)))
        self._depth = 0

    def complete(self, now: float) -> None:
        """Steps are completed by the test."""

    def wants_cores(self, now: float) -> bool:
        return self.is_wanting

    def claim(self) -> Claim:
        return Claim(self.name, self.cores, self.spent_s, self.is_computing)

    def set_alone(self, is_alone: bool) -> None:
        """See `test_rounds_say_which_models_are_alone_on_their_cores`."""

    def set_allowed_depth(self, depth: int) -> None:
        self._depth = depth

    def run_round(self, now: float) -> None:
        self.is_computing = self.is_computing or (self.is_wanting and self._depth > 0 and not self.lacks_pages)


def compute(rounds: Rounds, models: Mapping[str, Model], steps: int) -> dict[str, int]:
    """Steps of each model while the cores compute so many one after the other."""
    counts = dict.fromkeys(models, 0)
    for _ in range(steps):
        rounds.run(0.0)
        (computing,) = (model for model in models.values() if model.is_computing)
        computing.is_computing = False
        computing.spent_s += STEP_S
        counts[computing.name] += 1
    return counts


def two_models() -> tuple[Rounds, dict[str, Model]]:
    models = {name: Model(name) for name in "ab"}
    return rounds_of(models), models


def rounds_of(models: dict[str, Model]) -> Rounds:
    runners = cast("dict[str, VersionRunner]", cast("Any", models))
    return Rounds(runners, DraftPairs(), lambda runner: None)


def test_a_model_that_was_alone_for_long_shares_with_one_that_comes_back() -> None:
    """It is not charged with what it has computed alone: its streams go on."""
    rounds, models = two_models()
    models["a"].is_wanting = models["b"].is_wanting = True
    assert compute(rounds, models, 20) == {"a": 10, "b": 10}
    models["b"].is_wanting = False
    assert compute(rounds, models, 1000) == {"a": 1000, "b": 0}
    models["b"].is_wanting = True
    counts = compute(rounds, models, 20)
    assert abs(counts["a"] - counts["b"]) <= 2, counts


def test_a_model_that_was_the_only_one_shares_with_one_that_is_loaded() -> None:
    """It is idle when that comes."""
    rounds, models = two_models()
    models["a"].is_wanting = models["b"].is_wanting = True
    compute(rounds, models, 20)
    del models["b"]
    assert compute(rounds, models, 1000) == {"a": 1000}
    models["c"] = Model("c")
    models["a"].is_wanting = False
    rounds.run(0.0)
    models["a"].is_wanting = models["c"].is_wanting = True
    counts = compute(rounds, models, 20)
    assert abs(counts["a"] - counts["c"]) <= 2, counts


def test_a_model_that_waited_for_pages_does_not_make_up_for_it() -> None:
    rounds, models = two_models()
    models["a"].is_wanting = models["b"].is_wanting = True
    compute(rounds, models, 20)
    models["b"].lacks_pages = True
    assert compute(rounds, models, 1000) == {"a": 1000, "b": 0}
    models["b"].lacks_pages = False
    counts = compute(rounds, models, 20)
    assert abs(counts["a"] - counts["b"]) <= 2, counts


@pytest.mark.parametrize("a_s", [0.013, 0.031, 0.05])
@pytest.mark.parametrize("b_s", [0.05, 0.083])
@pytest.mark.parametrize("c_s", [0.011, 0.04, 0.12])
def test_a_model_on_the_cores_of_two_others_gets_its_share(a_s: float, b_s: float, c_s: float) -> None:
    """Their steps hardly ever end in the same round: one computes whenever the other has ended."""
    models = {
        "a": Model("a", frozenset({0}), a_s),
        "b": Model("b", frozenset({1}), b_s),
        "c": Model("c", frozenset({0, 1}), c_s),
    }
    rounds = rounds_of(models)
    longest_s = max(a_s, b_s, c_s)
    ends: dict[str, float] = {}
    waits_since = dict.fromkeys(models, 0.0)
    now = 0.0
    for model in models.values():
        model.is_wanting = True
    while now < 20.0:
        rounds.run(now)
        computing = {name for name, model in models.items() if model.is_computing}
        assert computing
        assert computing <= {"a", "b"} or computing == {"c"}
        for name in computing - set(ends):
            # Two others that take turns both catch up with its last step, and end the steps that they have begun.
            assert now - waits_since[name] <= 3 * longest_s + 1e-9, name
            ends[name] = now + models[name].step_s
        name = min(ends, key=lambda name: (ends[name], name))
        now = waits_since[name] = ends.pop(name)
        models[name].is_computing = False
        models[name].spent_s += models[name].step_s
    spent = {name: model.spent_s for name, model in models.items()}
    assert max(spent.values()) - min(spent.values()) <= 2 * longest_s, spent


def test_cores_are_kept_no_longer_than_until_the_turn_of_a_model_that_has_nothing_to_compute() -> None:
    models = {
        "a": Model("a", frozenset({0})),
        "b": Model("b", frozenset({1})),
        "c": Model("c", frozenset({0, 1})),
    }
    rounds = rounds_of(models)
    models["a"].is_wanting = models["b"].is_wanting = models["c"].is_wanting = True
    models["c"].lacks_pages = True
    for _ in range(50):
        rounds.run(0.0)
        assert models["a"].is_computing and models["b"].is_computing, "both begin at its turn, which passes"
        for name in "ab":  # one after the other: meanwhile the core of the first is kept for the third model
            models[name].is_computing = False
            models[name].spent_s += STEP_S
            if name == "a":
                rounds.run(0.0)


@pytest.mark.parametrize(
    ("cores", "alone"),
    [
        ([frozenset({0})], [True]),
        ([frozenset({0}), frozenset({1})], [True, True]),
        ([frozenset({0, 1}), frozenset({1, 2}), frozenset({3})], [False, False, True]),
        ([frozenset({0}), frozenset()], [False, False]),
    ],
)
def test_rounds_say_which_models_are_alone_on_their_cores(
    tmp_path: Path, cores: list[frozenset[int]], alone: list[bool]
) -> None:
    """A model that has nothing to compute now counts: it may have something before the next step ends."""
    runners: dict[str, VersionRunner] = {}
    rounds = Rounds(runners, DraftPairs(), lambda runner: None)
    for i, one in enumerate(cores):
        name = f"m{i}"
        runner = runners[name] = VersionRunner(
            Settings(name, 4, worker_groups=2),
            tmp_path / f"{name}.steps",
            16,
            0,
            10.0,
            0.0,
            lambda _: 1.0,
            lambda peer, frame: True,
            lambda frame: True,
        )
        runner.cores = one
    rounds.run(0.0)
    for runner, is_alone in zip(runners.values(), alone, strict=True):
        assert [group.steps.is_alone for group in runner.engine.groups] == [is_alone] * 2
    kept, *unloaded = runners.values()
    for runner in unloaded:
        del runners[runner.name]
        runner.close()
    rounds.run(0.0)
    assert all(group.steps.is_alone for group in kept.engine.groups)
    kept.close()
