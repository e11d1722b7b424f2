"""What the processes of a server hold at rest, beside arenas and weights: each role has its bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.observe.status import read_all
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import events
from tests.e2e.server import poll_until
from tests.e2e.up_server import Up
from tools.bench.memory import Process, measure, table
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

# PSS in MB, by the beginning of the role. A library that one process imports for nothing takes 5 MB and more.
BOUNDS = {
    "gateway": 45,
    "tokenizer": 35,
    "kv": 30,
    "scheduler": 30,
    "worker": 30,
    "starling up": 30,
}
TOTAL_MB = 200
REQUEST = {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 1, "ignore_eos": True, "stream": True}


def test_the_processes_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    with Up(tmp_path, {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 16, "ranks": 2}]}) as server:
        monkeypatch.setenv("STARLING_HOME", str(tmp_path))
        monkeypatch.setenv("STARLING_CONFIG", str(server.config_path))
        assert list(events(server, "/v1/generate", REQUEST, {}))
        wait_idle(tmp_path)
        processes = measure(load())
        shown = "\n".join(table(processes))
        assert {process.pid for process in processes} == set(server.pids()), shown
        for process in processes:
            assert process.use.pss < 1e6 * bound(process), f"{process.role}\n{shown}"
        assert sum(process.use.pss for process in processes) < 1e6 * TOTAL_MB, shown
        for pid in server.pids():
            mapped = Path(f"/proc/{pid}/maps").read_text()
            assert "llvmlite" not in mapped, server.pids()[pid]


def bound(process: Process) -> float:
    return next(mb for role, mb in BOUNDS.items() if process.role.startswith(role))


def wait_idle(home: Path) -> None:
    """Until no stage is busy: buffers of the request have been freed."""
    poll_until(lambda: not any(record.busy for record in read_all(home / "run")))
