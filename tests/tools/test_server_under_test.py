"""The server that is measured: what fails before it starts is shown with its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.http.server_under_test import ServerUnderTest, core_wait_s, exact_cpu_s
from tools.tiny_gguf import SHAPES, write_model

SPIN = """
import os, time
os.sched_setaffinity(0, {int(os.environ["CORE"])})
print(flush=True)
input()
while time.process_time() < float(os.environ["SECONDS"]):
    pass
print(flush=True)
input()
"""


def test_a_process_waits_for_its_core_as_long_as_another_one_computes_there() -> None:
    """Two processes share a core: the one that computes for longer has waited for all that the other has computed."""
    core = str(min(os.sched_getaffinity(0)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", SPIN],
            env={**os.environ, "CORE": core, "SECONDS": seconds},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for seconds in ("0.2", "0.6")
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        for process in processes:  # both are ready: one write each, and they compete from the beginning
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        short, long = processes
        assert exact_cpu_s(short.pid) > 0.19
        assert core_wait_s(long.pid) > 0.5 * exact_cpu_s(short.pid)
    finally:
        for process in processes:
            process.communicate(b"\n")


@pytest.mark.slow
def test_a_model_is_prepared_before_the_time_to_start_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be converted fails there."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    model = {"name": "m", "path": str(broken)}
    with pytest.raises(RuntimeError, match=r"could not be prepared:\n(.*\n)*.*broken\.gguf"):
        ServerUnderTest(model, sorted(os.sched_getaffinity(0)), {}, {})


@pytest.mark.slow
def test_the_server_divides_the_cores_that_it_may_run_on_itself(tmp_path: Path) -> None:
    """Nothing of it runs elsewhere, and ranks have what the control plane leaves them."""
    cores = sorted(os.sched_getaffinity(0))
    model = {"name": "m", "path": str(write_model(tmp_path / "m.gguf", SHAPES["small"], seed=1)), "kv_cache_mb": 8}
    with ServerUnderTest(model, cores[-1:], {}, {}) as server:
        threads = [int(one) for pid in server.pids for one in os.listdir(f"/proc/{pid}/task")]
        assert {core for thread in threads for core in os.sched_getaffinity(thread)} == {cores[-1]}
        assert server.rank_cores() == cores[-1:]
    if len(cores) > 1:
        with ServerUnderTest(model, cores[:2], {"performance": {"control_cores": 1}}, {}) as server:
            assert server.rank_cores() == cores[1:2]
