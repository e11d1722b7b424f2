"""Status records: `RUN_DIR/STAGE.status`, a small JSON file that each stage replaces atomically.

`starling status` reads them, so it works even when no stage answers.  A record is written when it has changed, at
most every 500 ms: an idle server writes nothing.  A record whose process (pid, ticks) has ended was left by a
crash: `read_all` marks it, and the next start of the stage replaces it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.files import replace_file
from pipeline.observe import log_levels
from pipeline.protocol.messages import Heartbeat
from pipeline.runtime.process import process_epoch
from shm.arena import process_ticks
from shm.decoding import DECODE_ERRORS

INTERVAL_S = 0.5


class StageStatus(msgspec.Struct, frozen=True):
    """One record."""

    stage: str
    pid: int
    ticks: int  # /proc/PID/stat field 22
    epoch: int  # start, ns since 1970
    uptime_s: float
    progress: int
    busy: bool
    ready: bool
    reason: str
    written: float  # s since 1970
    restarts: int = 0  # by the supervisor, its predecessors included
    parent: int = 0  # pid: the supervisor, if there is one
    alive: bool = True  # set by `read_all`: the process exists
    progressed: float = 0.0  # s since 1970: the last time that `progress` grew; 0.0: never
    log_level: str = ""


class StatusFile:
    """Writes the record of one stage."""

    def __init__(self, run_dir: Path, stage: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = run_dir / f"{stage}.status"
        self._clock = clock
        self._started = clock()
        self._ticks = process_ticks(os.getpid())
        self._next = float("-inf")
        self._last: tuple[object, ...] = ()  # state in the last record written
        self._has_failed = False
        self._progress = 0
        self._progressed = 0.0

    def write(self, heartbeat: Heartbeat) -> None:
        """Write at most every 500 ms, and at once when readiness changes. After an error it is tried again later."""
        now = self._clock()
        if heartbeat.progress != self._progress:
            self._progress, self._progressed = heartbeat.progress, round(time.time(), 3)
        level = log_levels.current()
        urgent = (heartbeat.ready, heartbeat.reason, level)
        state = (*urgent, heartbeat.busy, heartbeat.progress)
        if state == self._last or (now < self._next and (urgent == self._last[:3] or self._has_failed)):
            return
        self._next = now + INTERVAL_S
        record = StageStatus(
            heartbeat.stage,
            os.getpid(),
            self._ticks,
            process_epoch(),
            round(now - self._started, 3),
            heartbeat.progress,
            heartbeat.busy,
            heartbeat.ready,
            heartbeat.reason,
            round(time.time(), 3),
            int(os.environ.get("STARLING_RESTARTS", "0")),
            os.getppid(),
            progressed=self._progressed,
            log_level=level,
        )
        try:
            replace_file(self.path, msgspec.json.encode(record), of_run=True)
            self._last, self._has_failed = state, False
        except OSError:
            self._has_failed = True

    def remove(self) -> None:
        """Remove the record, at an orderly stop. One that stays is recognised by its process, which has ended."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def read_all(run_dir: Path) -> list[StageStatus]:
    """The last record of every stage, by name; `alive` is False when its process has ended.

    Raises `PermissionError` when the directory belongs to another user: an empty list would be wrong.
    """
    records = []
    try:
        names = sorted(name for name in os.listdir(run_dir) if name.endswith(".status") and name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        try:
            record = msgspec.json.decode((run_dir / name).read_bytes(), type=StageStatus)
        except (OSError, *DECODE_ERRORS):
            continue
        alive = process_ticks(record.pid) == record.ticks
        records.append(msgspec.structs.replace(record, alive=alive))
    return records
