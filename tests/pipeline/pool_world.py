"""A home with a worker pool as a process of its own (pool_process.py): for the tests of the pool and of its spare."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import ModelConfig
from pipeline.models import versions
from pipeline.models.versions import ModelVersion, VersionTable
from pipeline.runtime.run_dir import prepare

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class World:
    def __init__(self, home: Path, **sections: Any) -> None:
        file = home / "starling.yaml"
        settings: dict[str, Any] = {
            "models": [{"name": "m", "path": "/stay"}],
            "server": {
                "run_dir": str(home / "run"),
                "state_dir": str(home / "state"),
                "arena_dir": str(home / "shm"),
                "drain_timeout_ms": 300,
            },
            **sections,
        }
        file.write_text(yaml.safe_dump(settings))
        self.file = file
        self.config = load(file, {})
        self.run_dir = prepare(paths.run_dir(self.config))
        self.arenas = prepare(paths.arena_dir(self.config))
        self.pool: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        self.pool = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.pool_process", str(self.file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(self.file.parent), **environment},
        )
        return self.pool

    def write(self, *several: ModelVersion, serial: int = 9) -> None:
        known = versions.initial(self.config)
        versions.write(self.config, VersionTable(known.configured, serial, several))

    def lives(self, name: str) -> list[tuple[int, int]]:
        """(pid, pid below it) of each process of a version."""
        try:
            lines = (self.run_dir / "report").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(pid), int(below)) for one, pid, below in map(str.split, lines) if one == name]

    def wait(self, condition: Callable[[], Any]) -> None:
        """Until `condition()`, while the pool runs."""
        deadline = time.monotonic() + WAIT_S
        assert self.pool is not None
        fd = os.pidfd_open(self.pool.pid)
        try:
            while not condition():
                assert time.monotonic() < deadline
                if self.pool.poll() is None:
                    signal.pidfd_send_signal(fd, 0)
                time.sleep(0.001)  # a core for what it waits for
        finally:
            os.close(fd)

    def wait_begun(self, name: str, lives: int = 1) -> tuple[int, int]:
        self.wait(lambda: len(self.lives(name)) >= lives)
        return self.lives(name)[lives - 1]


def make(behaviour: str, serial: int, state: Any = "serving") -> ModelVersion:
    return ModelVersion(name="m", serial=serial, settings=ModelConfig(name="m", path=f"/{behaviour}"), state=state)
