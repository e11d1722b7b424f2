"""A watch of the benchmark on the steps of a server, without the server: the test writes the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from shm.step_ring import Steps, StepsGeometry, create_steps
from tools.bench.http.server_under_test import ServerUnderTest
from tools.bench.http.step_watch import StepWatch


@contextmanager
def watched_steps(run_dir: Path, geometry: StepsGeometry) -> Iterator[tuple[StepWatch, Steps]]:
    """The watch, and the views of the arena that it reads."""
    config = Config(server=ServerConfig(run_dir=str(run_dir)), models=(ModelConfig(name="m"),))
    folder = paths.arena_dir(config)
    folder.mkdir(parents=True)
    arena, views = create_steps(folder / f"{config.models[0].slug}.steps", geometry, bytes(32))
    place: Any = SimpleNamespace(run_dir=run_dir, model="m")
    watch = StepWatch(cast(ServerUnderTest, place))
    try:
        yield watch, views
    finally:
        watch.close()
        arena.close()
        arena.unlink()
        folder.rmdir()
