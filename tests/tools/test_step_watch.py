"""The benchmark's view of a server's steps: none is missed, however short they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shm import step_ring as sh
from shm.step_ring import Steps, StepsGeometry
from tests.tools.watched_steps import watched_steps
from tools.bench.http.step_watch import LOOK_S, StepWatch


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[tuple[StepWatch, Steps]]:
    geometry = StepsGeometry(max_rows=2, max_entries=2, max_samples=2, max_tokens=64, max_pages=4)
    with watched_steps(tmp_path, geometry) as both:
        yield both


@pytest.mark.parametrize("at_once", [1, 4])
def test_many_steps_between_two_times_of_a_look_are_all_seen(steps: tuple[StepWatch, Steps], at_once: int) -> None:
    """Data arrives after each of them, or after some, with as many published steps as there may be."""
    watch, views = steps
    watch.look_sometimes(1.0)
    for done in range(at_once, 65, at_once):
        views.control[sh.DONE], views.control[sh.HEAD] = done, done + sh.SLOTS // 2
        watch.look_sometimes(1.0 + done / 65 * LOOK_S)
    watch.look()
    assert (watch.missed, len(watch.steps)) == (0, 64)


def test_few_steps_are_not_looked_at_each_time(steps: tuple[StepWatch, Steps]) -> None:
    watch, views = steps
    watch.look_sometimes(1.0)
    views.control[sh.DONE] = views.control[sh.HEAD] = 1
    watch.look_sometimes(1.0 + LOOK_S / 2)
    assert not watch.steps
    watch.look_sometimes(1.0 + 2 * LOOK_S)
    assert len(watch.steps) == 1
