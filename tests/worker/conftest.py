"""Tiny random models, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.tiny_gguf import SHAPES, write_model

TinyGguf = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    """`tiny_gguf(shape, recipe, seed=0)`: path of a model; names as in tools/tiny_gguf.py."""
    directory = tmp_path_factory.mktemp("tiny")

    def get(shape: str = "small", recipe: str = "Q4_1", seed: int = 0) -> Path:
        path = directory / f"{shape}-{recipe}-{seed}.gguf"
        return path if path.exists() else write_model(path, SHAPES[shape], recipe, seed)

    return get
