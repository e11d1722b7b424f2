"""Log levels that an operator sets while the server runs: `RUN_DIR/log-levels.json`, followed by every stage.

    {"": "debug"}                  all stages
    {"kv": "debug", "worker": ...} one stage; "worker" stands for those of all models

A process reads the file when it starts, so that a level survives the restart of its stage; the file is removed when the
whole server has stopped.  `starling log-level` is the only writer, under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipeline.files import replace_file
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.logs")

FILE = "log-levels.json"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
MAX_BYTES = 65_536

_root = logging.getLogger("starling")


def current() -> str:
    """The level of this process's loggers."""
    return logging.getLevelName(_root.getEffectiveLevel()).lower()


def read(run_dir: Path) -> dict[str, str]:
    """Levels by stage, "" for all; empty if none is set or the file is damaged."""
    try:
        with open(run_dir / FILE, "rb") as file:
            found = msgspec.json.decode(file.read(MAX_BYTES), type=dict[str, str])
    except (OSError, *DECODE_ERRORS):
        return {}
    return {stage: level for stage, level in found.items() if level in LEVELS}


def level_of(levels: dict[str, str], stage: str, configured: str) -> str:
    """The level of a stage: its own, that of all workers, that of all stages, or the configured one."""
    group = stage.partition("-")[0]
    return levels.get(stage) or levels.get(group) or levels.get("") or configured


def change(run_dir: Path, stage: str, level: str) -> dict[str, str]:
    """Set the level of a stage, of "worker", or with "" of all stages. Level "": as configured. Returns all levels.

    A level of all stages replaces those of single stages.
    """
    with _lock(run_dir):
        levels = read(run_dir) if stage else {}
        levels.pop(stage, None)
        if stage == "worker":
            levels = {name: one for name, one in levels.items() if not name.startswith("worker-")}
        if level:
            levels[stage] = level
        if levels:
            replace_file(run_dir / FILE, msgspec.json.encode(levels))
        else:
            (run_dir / FILE).unlink(missing_ok=True)
    return levels


@contextlib.contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    """Held by one `change` at a time: two commands must not undo each other."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class LogLevelFollower:
    """Applies the levels to this process: call `poll` at every tick, which costs one system call."""

    def __init__(self, run_dir: Path, stage: str, configured: str) -> None:
        self._run_dir = run_dir
        self._path = os.fspath(run_dir / FILE)
        self._stage = stage
        self._configured = configured
        self._seen: tuple[int, int] | None = None  # (inode, mtime in ns) of the file; None: there was none
        self.poll()

    def poll(self) -> None:
        """Read the file if it has changed."""
        seen = None
        # Usually there is no file, and an exception takes ten times as long: 116 us with cold caches.
        if os.access(self._path, os.F_OK):
            with contextlib.suppress(OSError):  # it has been removed since
                found = os.stat(self._path)
                seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._seen:
            return
        self._seen = seen
        level = level_of(read(self._run_dir) if seen else {}, self._stage, self._configured)
        if level != current():
            _root.setLevel(LEVELS[level])
            log.warning("log level changed", extra={"level_now": level})
