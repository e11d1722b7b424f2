"""The server that is measured: what fails before it starts is shown with its output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.bench.http.server_under_test import ServerUnderTest


@pytest.mark.slow
def test_a_model_is_prepared_before_the_time_to_start_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be converted fails there."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    model = {"name": "m", "path": str(broken)}
    with pytest.raises(RuntimeError, match=r"could not be prepared:\n(.*\n)*.*broken\.gguf"):
        ServerUnderTest(model, sorted(os.sched_getaffinity(0)), {}, {})
