"""Removes sockets, records and arenas after the last stage of a server has exited.

A stage that stops in order removes its sockets; a killed one cannot, and arenas outlive every process by
design.  When the whole server has stopped they are useless: state that must survive is in the state
directory.  Every supervisor calls `sweep` when it ends and the last one succeeds: each stage's lock is taken
first, so nothing of a running server is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config import paths, server_cores


def sweep(
    run_dir: Path,
    arena_dir: Path,
    wait_s: float = 0.0,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Remove sockets, records and arenas of a stopped server; "" when done.

    The name of a stage that still holds its lock after `wait_s` seconds; nothing has been removed then.
    """
    deadline = clock() + wait_s
    while True:
        with _all_locks(run_dir) as running:
            if not running:
                for path in _records(run_dir):
                    path.unlink(missing_ok=True)
                remove_arenas(arena_dir)
                if recorded := paths.recorded_arena_parent(run_dir):  # server.arena_dir may have been set since
                    remove_arenas(recorded / arena_dir.name)
                (run_dir / paths.ARENA_PARENT_FILE).unlink(missing_ok=True)  # last: it says where they are
                return ""
        if clock() >= deadline:
            return running
        pause(0.02)


@contextmanager
def _all_locks(run_dir: Path) -> Iterator[str]:
    """Hold the locks of all stages; yields the first stage that holds its own, or ""."""
    fds: list[int] = []
    try:
        # One sweep at a time: the last supervisor must not take the lock of a sweep that fails for that of a stage.
        with contextlib.suppress(FileNotFoundError):
            fds.append(os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fcntl.flock(fds[-1], fcntl.LOCK_EX)
        for path in sorted(run_dir.glob("*.lock")):
            try:
                fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            except FileNotFoundError:  # the worker pool has removed it: that version is over
                continue
            try:
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield path.stem
                return
        yield ""
    finally:
        for fd in reversed(fds):  # that of the sweep last
            os.close(fd)


def _records(run_dir: Path) -> Iterator[Path]:
    for path in run_dir.glob("*.sock"):
        if stat.S_ISSOCK(path.lstat().st_mode):
            yield path
    yield from run_dir.glob("worker-*.lock")  # one for each version of each model, unlike those of the other stages
    yield from run_dir.glob("*.status")
    yield from run_dir.glob("*.restarts")
    yield from run_dir.glob("*.failed")
    yield from run_dir.glob("*.start")
    yield from run_dir.glob("*.copies")  # pipeline/models/weight_copies.py
    yield from run_dir.glob("weight-copies")
    yield from run_dir.glob(server_cores.FILE)
    yield from run_dir.glob("versions.json")
    yield from run_dir.glob("versions.bell")
    yield from run_dir.glob("log-levels.json")
    yield from run_dir.glob("gateway.pem")  # pipeline/tls/trust.py
    yield from run_dir.glob(".*.new")  # of an interrupted `replace_file`


def remove_arenas(arena_dir: Path) -> None:
    """For when no process uses them. Regular files of this user only; the directory is removed when it is empty."""
    if arena_dir.is_symlink() or not arena_dir.is_dir():
        return
    for path in arena_dir.iterdir():
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid():
            path.unlink(missing_ok=True)
    try:
        arena_dir.rmdir()
    except OSError:  # not empty
        pass
