"""The last one out turns off the light: what the end of a server leaves behind is removed.

A stage that ends in order removes its sockets; one that was killed cannot, and arenas outlive everybody
by design.  When the whole server is over, nobody needs them: state that should survive is in the state
directory.  Every supervisor tries this when it ends, and the last one succeeds: each stage's lock is
taken first, so that nothing of a living server is ever touched.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def sweep(
    run_dir: Path,
    arena_dir: Path,
    wait_s: float = 0.0,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Remove sockets, records and arenas of a server that is over.

    Returns the name of a stage that still holds its lock after `wait_s`, having removed nothing; "" when
    all is done.
    """
    deadline = clock() + wait_s
    while True:
        with _locks(run_dir) as held_by_another:
            if not held_by_another:
                for path in _ours(run_dir):
                    path.unlink(missing_ok=True)
                _remove_arenas(arena_dir)
                return ""
        if clock() >= deadline:
            return held_by_another
        pause(0.02)


@contextmanager
def _locks(run_dir: Path) -> Iterator[str]:
    """Hold the locks of all stages; yields the first that somebody else has, or ""."""
    fds: list[int] = []
    try:
        # In one order, and no further than the first that is taken: of two sweepers one gets them all.
        for path in sorted(run_dir.glob("*.lock")):
            fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            try:
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield path.stem
                return
        yield ""
    finally:
        for fd in fds:
            os.close(fd)


def _ours(run_dir: Path) -> Iterator[Path]:
    for path in run_dir.glob("*.sock"):
        if stat.S_ISSOCK(path.lstat().st_mode):
            yield path
    yield from run_dir.glob("*.status")
    yield from run_dir.glob("*.failed")
    yield from run_dir.glob("versions.json")
    yield from run_dir.glob("lineup.json")  # the name of that record before version 0.2
    yield from run_dir.glob(".versions.json.new")
    yield from run_dir.glob(".*.status.new")


def _remove_arenas(arena_dir: Path) -> None:
    """Files only, and only this user's; the directory goes when it is empty."""
    if arena_dir.is_symlink() or not arena_dir.is_dir():
        return
    for path in arena_dir.iterdir():
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid():
            path.unlink(missing_ok=True)
    try:
        arena_dir.rmdir()
    except OSError:  # something that is not ours is in it
        pass
