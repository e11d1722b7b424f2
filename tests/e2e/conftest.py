"""One server of the demo model for the tests of this folder that do not end it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL
from tests.e2e.server import PlainServer, Server


def share_caches(home: Path, models: bool = False) -> None:
    """Link the compiled kernels of the tests' own home into `home`, with `models` the checkpoints as well."""
    for folder in (paths.cache_dir(), paths.models_dir())[: 1 + models]:
        folder.mkdir(parents=True, exist_ok=True)
        (home / folder.name).symlink_to(folder)


def copy_cache(source: Path, target: Path) -> None:
    """Copy a cache. Other tests may be compiling into it: an unfinished file may be gone when its turn comes."""

    def copy(one: str, other: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(one, other)

    shutil.copytree(source, target, copy_function=copy, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory, demo_gguf: Path) -> Iterator[Server]:
    """Every stage under plain `honcho start`, with a KV arena small enough for evictions."""
    home = tmp_path_factory.mktemp("demo")
    share_caches(home, models=True)
    config = {"models": [{"name": DEMO_MODEL, "kv_cache_mb": 128, "spill_path": str(home / "spill"), "spill_mb": 64}]}
    with PlainServer(home, config) as server:
        yield server
        # Supervisors import the stages before they fork them, so that a restart needs no imports.
        assert not [line for line in server.output if "restarts will import again" in line]
        server.stop()
        assert server.leftovers() == []
        assert server.pids() == {}
