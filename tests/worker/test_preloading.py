"""What the worker pool reads before its first fork keeps no group from being forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.models import store
from stages.worker import preloading


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setattr(preloading, "_has_read", False)
    server = {"run_dir": str(tmp_path / "run")}
    return resolve({"server": server, "models": [{"name": "m", "path": str(tmp_path / "m.gguf")}]}, {})


def test_models_are_read_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs later must not stop the pool's only thread."""
    asked = []
    monkeypatch.setattr(store, "find_index", lambda model, folder: asked.append(model.name))
    for _ in range(3):
        preloading.preload(config)
    assert asked == ["m"]


def test_a_model_that_cannot_be_read_is_left_to_its_worker(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(model: object, folder: Path) -> Path:
        raise ValueError("an unforeseen file")

    monkeypatch.setattr(store, "find_index", find)
    preloading.preload(config)
