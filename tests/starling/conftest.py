"""An empty home for the tests of commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty STARLING_HOME and no other setting."""
    for name in [name for name in os.environ if name.startswith(("STARLING_", "LLM_ENGINE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"
