"""`starling up`, as `make serve` runs it: it starts, serves, and leaves no process or file after its end."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import procfs
from stages.worker.kernels import build, features
from tests.e2e.conftest import copy_cache, share_caches
from tests.e2e.server import START_S, STOP_S, poll_until, wait_gone
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

ATTEMPTS = 4  # to stop a server


@pytest.fixture
def config(tmp_path: Path) -> dict[str, object]:
    """A configuration of one tiny model, with the kernels that all tests share."""
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    return {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 16}]}


def test_up_serves_and_ctrl_c_leaves_no_process_or_file(tmp_path: Path, config: dict[str, object]) -> None:
    with Up(tmp_path, config) as server:
        events = list(server.stream("/v1/generate", prompt=[1, 2, 3], max_tokens=5, ignore_eos=True, seed=1))
        assert sum(len(event.get("tokens", ())) for event in events) == 5
        whole = server.post("/v1/generate", prompt=[1, 2, 3], max_tokens=5, ignore_eos=True, seed=1)
        tokens = [token for event in events for token in event.get("tokens", ())]
        assert whole["choices"][0]["tokens"] == tokens
        pids = server.pids()
        assert len(pids) > 5
        # As a terminal does: to the foreground process group.
        assert server.stop(signal.SIGINT) == 0
        assert all(wait_gone(pid) for pid in pids)
    assert server.leftovers() == []


def test_ctrl_c_while_it_starts(tmp_path: Path, config: dict[str, object]) -> None:
    server = Up(tmp_path, config).start()
    try:
        server.wait_for(r"gateway\.1 +\| |gateway\.1 started")
        pids = server.pids()
        assert server.stop(signal.SIGINT) == 0
        assert all(wait_gone(pid) for pid in pids)
        assert server.leftovers() == []
    finally:
        server.stop(signal.SIGKILL)


def test_the_stages_do_not_outlive_up(tmp_path: Path, config: dict[str, object]) -> None:
    server = Up(tmp_path, config).start()
    try:
        server.wait_ready()
        pids = server.pids()
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        # The supervisors detect the end of `up` themselves, and the last one cleans up.
        assert all(wait_gone(pid) for pid in pids)
        server.process.wait()
        assert server.leftovers() == []
    finally:
        server.stop(signal.SIGKILL)


class ShortCommand(Up):
    """As typed: the arguments of the process take less memory than those of a supervisor."""

    command = ("bash", "-c", "exec -a python python -m starling up")


@pytest.mark.parametrize("kind", [Up, ShortCommand])
def test_supervisors_are_forks_of_up(tmp_path: Path, config: dict[str, object], kind: type[Up]) -> None:
    with kind(tmp_path, config) as server:
        assert server.process is not None
        supervisors = [procfs.command(pid) for pid in procfs.children(server.process.pid)]
        assert supervisors and all(words[:2] == ["starling", "supervise"] for words in supervisors), supervisors
        assert server.stop(signal.SIGINT) == 0
    assert server.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_finishes_while_all_stages_are_stopping(
    tmp_path: Path, config: dict[str, object], number: signal.Signals
) -> None:
    for _ in range(ATTEMPTS):
        whole, events = stopped_meanwhile(Up(tmp_path, config), number)
        # Stages that stop have 4 s for their streams (server.drain_timeout_ms), which may be too few on a busy machine.
        if "did not finish within 4 s" not in str(events[-1].get("error")):
            break
    assert not [event for event in events if "error" in event], events[-1]
    assert [token for event in events for token in event.get("tokens", ())] == whole["tokens"]
    assert "".join(event.get("text", "") for event in events) == whole["text"]


def stopped_meanwhile(server: Up, number: signal.Signals) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An answer, and the events of the same one in the middle of which the server is stopped."""
    request = {"prompt": [1, 2, 3], "max_tokens": 300, "seed": 3, "ignore_eos": True}
    server.start()
    try:
        server.wait_ready()
        whole = server.post("/v1/generate", **request)["choices"][0]
        stream = server.stream("/v1/generate", **request)
        events = [next(stream)]
        assert server.process is not None
        os.killpg(server.process.pid, number)  # as a terminal does
        events += stream
        code = server.process.wait(STOP_S)
        if "error" not in events[-1]:
            assert code == 0
            assert server.leftovers() == []
        return whole, events
    finally:
        server.stop(signal.SIGKILL)


def test_up_starts_again_after_every_process_was_killed(tmp_path: Path, config: dict[str, object]) -> None:
    server = Up(tmp_path, config).start()
    try:
        server.wait_ready()
        assert server.process is not None
        server.kill_all()
        server.process.wait()
        assert server.leftovers(), "no process could clean up"
    finally:
        server.stop(signal.SIGKILL)
    with Up(tmp_path, config) as again:
        assert again.post("/v1/generate", prompt=[1, 2, 3], max_tokens=1)["choices"]
        assert again.stop(signal.SIGTERM) == 0
    assert again.leftovers() == []


class ClosedOutput(Up):
    """The reader of its output closes the pipe after the first line that holds `last`."""

    last = ""

    def _read(self, process: subprocess.Popen[str], into: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                into.put(line)
                if self.last in line:
                    break
        into.put(None)

    def is_ready(self) -> bool:
        try:
            return self.request("GET", "/ready")[0] == 200
        except OSError:  # the gateway does not listen yet
            return False


@pytest.mark.parametrize("last", ["started (pid=", "Starling is ready"])
def test_up_goes_on_when_the_reader_of_its_output_has_closed_the_pipe(
    tmp_path: Path, config: dict[str, object], last: str
) -> None:
    server = ClosedOutput(tmp_path, config)
    server.last = last
    server.start()
    try:
        server.wait_for(re.escape(last))
        process = server.process
        assert process is not None
        poll_until(lambda: process.poll() is not None or server.is_ready(), timeout_s=START_S)
        assert process.poll() is None
        for _ in range(3):  # each request is logged
            assert server.post("/v1/generate", prompt=[1, 2, 3], max_tokens=5)["choices"]
        pids = server.pids()
        assert server.stop(signal.SIGTERM) == 0
        assert all(wait_gone(pid) for pid in pids)
        assert server.leftovers() == []
    finally:
        server.stop(signal.SIGKILL)


@pytest.mark.parametrize("command", [("prepare",), ("prepare", "--kernels", "f16"), ("up",)])
def test_a_kernel_that_cannot_be_compiled_is_one_message_and_a_file(
    tmp_path: Path, config: dict[str, object], command: tuple[str, ...]
) -> None:
    build.build("f16")
    (tmp_path / "cache").unlink()
    copy_cache(found := features.cache_dir(), kernels := tmp_path / "cache" / found.name)
    for name in ("head-any.symbol", "head-any.o"):
        (kernels / name).unlink()
    in_the_way = kernels / "head-any.o" / "folder"
    in_the_way.mkdir(parents=True)
    server = Up(tmp_path, config)
    done = subprocess.run(
        [sys.executable, "-m", "starling", *command], env=server.environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    log = tmp_path / "logs" / "kernel-compiler.log"
    (line,) = done.stderr.splitlines()
    assert line.startswith("starling: kernel 'head' could not be compiled: IsADirectoryError: ")
    assert line.endswith(f"; run the command again; the compiler's output is in {log}")
    assert "Traceback" in log.read_text() and "IsADirectoryError" in log.read_text()
    assert server.leftovers() == []
    in_the_way.rmdir()
    in_the_way.parent.rmdir()
    again = subprocess.run([sys.executable, "-m", "starling", "prepare"], env=server.environment)
    assert again.returncode == 0
