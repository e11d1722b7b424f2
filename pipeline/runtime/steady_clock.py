"""Seconds since 1970 that no change of the system's clock moves: for ages that survive a restart of the process.

    same boot     now = epoch + time since boot: the epoch was taken from the system's clock once, and is in a file
    other boot    the system's clock gives a new epoch, but no earlier time than the file's last one
    no file       as another boot, without a last time

So while the machine runs, a step of the clock (by NTP, an administrator, a guest's migration) makes no session, quota
or request older or younger.  Time since boot includes suspension.

The file has one writer, the process that holds its stage's lock: `{"boot": id, "epoch_ns": n, "last_ns": n}`.  A file
that is missing, damaged or cannot be written costs only the comparison with the times of before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.files import make_directory, replace_file

log = logging.getLogger("starling.clock")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_FILE = 4096  # bytes


class _Record(msgspec.Struct):
    boot: str
    epoch_ns: int  # ns since 1970 at the boot
    last_ns: int  # ns since 1970 when the file was written


def read_boot_id() -> str:
    """The kernel's id of this boot; "" if it has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def time_since_boot_ns() -> int:
    """Nanoseconds since the boot, suspension included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Call `seconds` or `ns`. The file is read and written once, here."""

    def __init__(
        self,
        path: Path,
        wall_ns: Callable[[], int] = time.time_ns,
        boot_ns: Callable[[], int] = time_since_boot_ns,
        boot_id: Callable[[], str] = read_boot_id,
    ) -> None:
        self._boot_ns = boot_ns
        boot, wall, since_boot = boot_id(), wall_ns(), boot_ns()
        known = _read(path)
        if known is not None and boot and known.boot == boot and known.epoch_ns + since_boot >= known.last_ns:
            self._epoch_ns = known.epoch_ns
        else:
            earliest = known.last_ns if known is not None else 0
            if wall < earliest:
                log.warning(
                    "the clock of the system is behind the time of the last start; ages are measured from that",
                    extra={"seconds": (earliest - wall) // 1_000_000_000},
                )
            self._epoch_ns = max(wall, earliest) - since_boot
        try:
            make_directory(path.parent)
            replace_file(path, msgspec.json.encode(_Record(boot, self._epoch_ns, self._epoch_ns + since_boot)))
        except OSError as error:
            log.warning(
                "the steady clock cannot be stored: after a restart ages follow the clock of the system",
                extra={"path": str(path), "reason": str(error)},
            )

    def ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._epoch_ns + self._boot_ns()

    def seconds(self) -> float:
        """Seconds since 1970."""
        return self.ns() / 1e9


def clock_path(state_dir: Path, stage: str) -> Path:
    """The file of a stage's clock."""
    return state_dir / "clock" / f"{stage}.json"


def read_ns(path: Path) -> int:
    """The time by the clock of another process, ns since 1970; the system's time if it has none of this boot."""
    known = _read(path)
    if known is None or known.boot != read_boot_id():
        return time.time_ns()
    return known.epoch_ns + time_since_boot_ns()


def _read(path: Path) -> _Record | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(MAX_FILE), type=_Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
