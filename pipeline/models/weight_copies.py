"""Records of the copies that versions have of their weights, one on each memory node (`performance.weight_copies`).

    RUN_DIR/worker-SLUG.copies   their bytes, the process that has them, and whether they are made

A worker writes its record before it takes the memory, and one worker at a time looks at what is available and at the
records of the others, so that versions that start together do not take the same memory.  The gateway reads what an
unload would free.  A record whose process has ended counts as nothing; the worker pool removes it with the version's
other files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline.files import replace_file
from shm.arena import process_ticks
from shm.decoding import DECODE_ERRORS

SUFFIX = ".copies"


class WeightCopies(msgspec.Struct, frozen=True):
    """The copies of one version."""

    nbytes: int  # of all of them
    pid: int
    ticks: int  # when that process started: pids are used again
    is_made: bool = False  # the memory has been taken: it no longer counts as available


class Totals(NamedTuple):
    """Bytes of the copies of several versions."""

    made: int = 0
    promised: int = 0  # of those that are being made, as if none of their memory had been taken


def path_of(run_dir: Path, stage: str) -> Path:
    """The record of a version's worker, whose stage is named."""
    return run_dir / f"{stage}{SUFFIX}"


@contextmanager
def one_at_a_time(run_dir: Path) -> Iterator[None]:
    """Between a look at the memory and the record of what is taken of it. Raises `OSError`."""
    fd = os.open(run_dir / "weight-copies", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def record(run_dir: Path, stage: str, nbytes: int, *, is_made: bool) -> None:
    """Replace the record of this process. Raises `OSError`."""
    copies = WeightCopies(nbytes, os.getpid(), process_ticks(os.getpid()), is_made)
    replace_file(path_of(run_dir, stage), msgspec.json.encode(copies))


def remove(run_dir: Path, stage: str) -> None:
    """There are no copies."""
    with contextlib.suppress(OSError):
        path_of(run_dir, stage).unlink(missing_ok=True)


def of(run_dir: Path, stage: str) -> WeightCopies | None:
    """The copies of a version whose process lives."""
    try:
        copies = msgspec.json.decode(path_of(run_dir, stage).read_bytes(), type=WeightCopies)
    except (OSError, *DECODE_ERRORS):
        return None
    return copies if copies.ticks == process_ticks(copies.pid) else None


def totals(run_dir: Path, without: str = "") -> Totals:
    """The copies of all versions but the one whose stage is `without`."""
    made = promised = 0
    with contextlib.suppress(OSError):
        for path in run_dir.glob(f"worker-*{SUFFIX}"):
            copies = of(run_dir, path.name.removesuffix(SUFFIX)) if path.name != without + SUFFIX else None
            made += copies.nbytes if copies is not None and copies.is_made else 0
            promised += copies.nbytes if copies is not None and not copies.is_made else 0
    return Totals(made, promised)
