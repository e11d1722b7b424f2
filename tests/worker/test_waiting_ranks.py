"""Ranks that are forked ahead compute as others do; where they do not fit, or one has ended, none is left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipeline import procfs
from pipeline.runtime.process import EXIT_FATAL
from shm.checkpoint import load_index
from stages.worker.ranks import Channel, channel_pair, fork_rank
from tests.e2e.server import wait_gone
from tests.worker.conftest import Ingested, TinyGguf
from tools.tiny_gguf import SHAPES, write_model

LONG_S = 600.0  # that only a failure reaches: these processes run on what others leave of the cores
MANY_CPUS = -1  # a number of ranks: three, on so many CPUs that the message does not fit

# Forks two ranks, and takes them after a line of input: the number of ranks that the version needs.
LEADER = """
import os, sys
from pathlib import Path
from pipeline.config.load import resolve
from shm.checkpoint import Checkpoint
from stages.worker import ranks as rank_processes
from stages.worker import waiting_ranks
from stages.worker.kernels import compiled
from stages.worker.model import Model
from stages.worker.rank_places import RankPlaces
from stages.worker.ranks import watch
from stages.worker.warm_up import warm_up

rank_processes.ACK_S = 3000.0  # these processes run on what others leave of the cores
compiled.addresses("f16")
watched = waiting_ranks.fork_waiting(resolve({"models": [{"name": "m", "path": "/m.gguf", "ranks": 3}]}, {}))
print(*(rank.pid for rank in waiting_ranks._waiting), flush=True)
n_ranks, maps = int(input()), True
checkpoint, cpus = Checkpoint(Path(sys.argv[1])), sorted(os.sched_getaffinity(0))
if n_ranks < 0:
    n_ranks, cpus = 3, cpus * 5000
ranks = waiting_ranks.take(checkpoint if n_ranks else None, "f16", cpus, n_ranks or 3, maps)
print(len(ranks), flush=True)
if ranks:
    waiting_ranks.await_ready()
    watch(ranks)
    base = Path(sys.argv[2]) / "m.act"
    print(warm_up(Model(checkpoint), ranks, RankPlaces(cpus), "f16", 32, base), flush=True)
input()
"""

Leader = subprocess.Popen[str]


@contextmanager
def leader(*arguments: Path) -> Iterator[tuple[Leader, list[int]]]:
    """Start it; yields it and the process ids of its ranks."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process, [int(pid) for pid in answer(process).split()]
        finally:
            process.kill()


def answer(process: Leader) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def ask(process: Leader, n_ranks: int) -> int:
    """The number of ranks that are taken by a version that needs `n_ranks`; 0: one that shares more than files."""
    assert process.stdin is not None
    process.stdin.write(f"{n_ranks}\n")
    process.stdin.flush()
    return int(answer(process))


@pytest.mark.slow
@pytest.mark.parametrize("has_revision", [False, True])
def test_ranks_that_waited_compute(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, has_revision: bool) -> None:
    """`has_revision`: a model whose kernels have another name than older releases gave them."""
    shape = SHAPES["gemma3"]._replace(window=300, context_length=300)
    source = write_model(tmp_path / "m.gguf", shape, "Q8_0") if has_revision else tiny_gguf("small", "Q8_0")
    index_path = ingested(source)
    assert load_index(index_path).hyper.kv_revision == has_revision
    with leader(index_path, tmp_path) as (process, pids):
        assert len(pids) == 2
        assert ask(process, 3) == 2
        assert answer(process) == "0\n", "entries were refused"
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait(LONG_S) == EXIT_FATAL
        assert wait_gone(pids[0], LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4, 0])
def test_ranks_that_do_not_fit_are_killed(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, n_ranks: int
) -> None:
    with leader(ingested(tiny_gguf("small", "Q8_0")), tmp_path) as (process, pids):
        assert ask(process, n_ranks) == 0
        assert all(wait_gone(pid, LONG_S) for pid in pids)
        assert process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_none_is_taken_if_one_has_ended_or_is_stopped(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, number: signal.Signals
) -> None:
    with leader(ingested(tiny_gguf("small", "Q8_0")), tmp_path) as (process, pids):
        os.kill(pids[0], number)
        while (Path("/proc") / str(pids[0]) / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZT":
            pass
        assert ask(process, 3) == 0
        assert all(wait_gone(pid, LONG_S) for pid in pids)


@pytest.mark.slow
def test_ranks_that_wait_end_with_their_process(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> None:
    with leader(ingested(tiny_gguf("small", "Q8_0")), tmp_path) as (process, pids):
        process.kill()
        assert all(wait_gone(pid, LONG_S) for pid in pids)


@pytest.mark.slow
def test_none_is_taken_if_the_message_to_a_rank_is_too_long_for_one_write(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path
) -> None:
    """It would arrive in parts."""
    with leader(ingested(tiny_gguf("small", "Q8_0")), tmp_path) as (process, pids):
        assert ask(process, MANY_CPUS) == 0
        assert all(wait_gone(pid, LONG_S) for pid in pids)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_a_channel_that_cannot_be_made_leaves_nothing_open(free: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(free):
            os.close(held.pop())
        with pytest.raises(OSError, match="Too many open files"):
            channel_pair()
        for _ in range(free):
            held.append(os.dup(0))
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_of_which_nothing_can_be_known_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    def body(channel: Channel) -> int:
        signal.pause()
        return 0

    before, children = descriptors(), procfs.children(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        fork_rank(body)
    assert descriptors() == before
    assert procfs.children(os.getpid()) == children


def test_messages_that_are_not_read_yet_stay_apart() -> None:
    """A rank that begins may get the next message before it has read the first."""
    ours, theirs = channel_pair()
    ours.send(b"begin")
    ours.send(b"attach")
    assert [theirs.receive(), theirs.receive()] == [b"begin", b"attach"]
    ours.close()
    assert theirs.receive() == b""
    theirs.close()
