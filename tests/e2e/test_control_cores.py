"""The stages of the control plane, and all that supervises, run on their core, and ranks on the other one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, poll_until, wait_gone
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

CONTROL = ("gateway", "tokenizer", "scheduler", "kv")


def one_control_core(home: Path) -> dict[str, object]:
    """The configuration of a server with a tiny model, whose control plane has one core."""
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"], seed=1)
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 8}
    return {"models": [model], "performance": {"control_cores": 1}}


def cores_of(pid: int) -> set[int]:
    """The cores that threads of a process may run on."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found |= os.sched_getaffinity(int(thread))
    return found


@pytest.mark.skipif("len(os.sched_getaffinity(0)) < 2", reason="ranks and control plane need a core each")
def test_no_stage_of_the_control_plane_runs_on_a_core_that_computes(tmp_path: Path) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    with Server(tmp_path, one_control_core(tmp_path)) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "seed": 1, "ignore_eos": True}
        text = server.post("/v1/generate", **body)["choices"][0]["text"]
        assert text
        for stage in ("scheduler", "gateway"):
            assert {name: cores_of(server.pid_of(name)) for name in CONTROL} == {name: {first} for name in CONTROL}
            assert os.sched_getaffinity(server.pid_of("worker-tiny")) <= set(others)  # rank 0 is the main thread
            killed = server.pid_of(stage)
            os.kill(killed, signal.SIGKILL)
            poll_until(lambda stage=stage, killed=killed: server.pid_of(stage) != killed)
        assert server.post("/v1/generate", **body)["choices"][0]["text"] == text
        server.stop()


def allowed_lists(pid: int) -> set[str]:
    """What the kernel's status files say of the threads of a process; empty once it has ended."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = (thread / "status").read_text()
                found.update(re.findall(r"^Cpus_allowed_list:\t(.*)$", text, re.M))
    return found


@pytest.mark.skipif("len(os.sched_getaffinity(0)) < 2", reason="ranks and control plane need a core each")
def test_no_supervisor_waits_on_a_core_that_computes(tmp_path: Path) -> None:
    """Nor their successors. Rank 0, which one of them starts, has the core that it has without them."""
    first, *others = sorted(os.sched_getaffinity(0))
    with Up(tmp_path, one_control_core(tmp_path)) as server:

        def elsewhere() -> dict[str, set[str]]:
            """Processes but the worker's that may run on other cores than the control plane's."""
            worker = server.pid_of("worker-tiny")
            found = {f"{pid} {command}": allowed_lists(pid) for pid, command in server.pids().items() if pid != worker}
            return {process: lists for process, lists in found.items() if lists - {str(first)}}

        def check() -> None:
            poll_until(lambda: not elsewhere(), elsewhere)  # some have just begun
            # Rank 0 takes its core a moment after its process has begun.
            poll_until(lambda: os.sched_getaffinity(server.pid_of("worker-tiny")) == {others[0]})

        def parent(pid: int) -> int:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

        def kill(pid: int) -> None:
            os.kill(pid, signal.SIGKILL)
            assert wait_gone(pid)

        check()
        assert len(server.pids()) == 12  # up, five stages and supervisors, the pool
        supervisor = parent(server.pid_of("worker-tiny"))
        for killed in (server.pid_of("worker-tiny"), supervisor, parent(supervisor), parent(server.pid_of("kv"))):
            kill(killed)
            server.wait_recorded()
            check()
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "seed": 1, "ignore_eos": True}
        assert server.post("/v1/generate", **body)["choices"][0]["text"]
        assert server.stop() == 0
