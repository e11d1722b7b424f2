"""The benchmark's view of a server's steps: none is missed, however short they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from shm import step_ring as sh
from shm.step_ring import Steps, StepsGeometry, create_steps
from tools.bench.http.server_under_test import ServerUnderTest
from tools.bench.http.step_watch import LOOK_S, StepWatch


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[tuple[StepWatch, Steps]]:
    """A watch on an arena without a server."""
    config = Config(server=ServerConfig(run_dir=str(tmp_path)), models=(ModelConfig(name="m"),))
    folder = paths.arena_dir(config)
    folder.mkdir(parents=True)
    geometry = StepsGeometry(max_rows=2, max_entries=2, max_samples=2, max_tokens=64, max_pages=4)
    arena, views = create_steps(folder / f"{config.models[0].slug}.steps", geometry, bytes(32))
    place: Any = SimpleNamespace(run_dir=tmp_path, model="m")
    watch = StepWatch(cast(ServerUnderTest, place))
    yield watch, views
    watch.close()
    arena.close()
    arena.unlink()
    os.rmdir(folder)


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
