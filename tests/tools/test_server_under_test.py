"""The server that is measured: what fails before it starts is shown with its output."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tools.bench.http.server_under_test import ServerUnderTest, core_wait_s, exact_cpu_s
from tools.tiny_gguf import SHAPES, write_model

# Prints a line when it begins to compute, and one when it has: for so many seconds of CPU time, or until its next line.
SPIN = """
import os, select, sys, time
os.sched_setaffinity(0, {int(os.environ["CORE"])})
os.read(0, 1)
print(flush=True)
until = time.process_time() + float(os.environ["SECONDS"])
while time.process_time() < until and not select.select([0], [], [], 0)[0]:
    pass
print(flush=True)
os.read(0, 1)
os.read(0, 1)
"""


def test_a_process_waits_for_its_core_as_long_as_another_one_computes_there() -> None:
    """Two processes share a core: the one that computes all the time has waited for what the other has computed."""
    core = str(min(os.sched_getaffinity(0)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", SPIN],
            env={**os.environ, "CORE": core, "SECONDS": seconds},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for seconds in ("0.3", "inf")
    ]

    def go_on(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()

    def has_printed(process: subprocess.Popen[bytes]) -> bool:
        assert process.stdout is not None
        return process.stdout.readline() == b"\n"

    short, long = processes
    try:
        go_on(long)
        assert has_printed(long)
        before = core_wait_s(long.pid)
        go_on(short)
        assert has_printed(short) and has_printed(short)
        computed = exact_cpu_s(short.pid)
        go_on(long)
        assert has_printed(long)  # a wait counts when it ends
        assert computed > 0.29
        assert core_wait_s(long.pid) - before > 0.5 * computed
    finally:
        for process in processes:
            process.kill()
            process.communicate()


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
        used: set[int] = set()
        for thread in [int(one) for pid in server.pids for one in os.listdir(f"/proc/{pid}/task")]:
            with suppress(ProcessLookupError):  # it has just ended
                used |= os.sched_getaffinity(thread)
        assert used == {cores[-1]}
        assert server.rank_cores() == cores[-1:]
    if len(cores) > 1:
        with ServerUnderTest(model, cores[:2], {"performance": {"control_cores": 1}}, {}) as server:
            assert server.rank_cores() == cores[1:2]
