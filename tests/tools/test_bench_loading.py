"""The benchmark of loads on demand runs, and reports every figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench.loading.command import main, spread
from tools.tiny_gguf import SHAPES, write_model


def test_figures_are_medians_with_their_range() -> None:
    assert spread([30.0, 10.0, 20.0]) == {"median_ms": 20.0, "low_ms": 10.0, "high_ms": 30.0}


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    done = CliRunner().invoke(main, ["--rounds", "1", "--no-baseline", "--model", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])["loading"]["starling"]
    assert found["not_loaded"]["median_ms"] > 0 < found["loaded"]["median_ms"]
