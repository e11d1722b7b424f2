"""`RUN_DIR/STAGE.status`: what a stage says of itself, one small JSON record placed by rename.

For `starling status`, which also works when nothing answers.  Written when something has changed, at most
every 500 ms: a server at rest writes nothing.  A record whose process (pid, ticks) is gone was left by a
crash: `read_all` says so, the stage's next start replaces it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.protocol.messages import Heartbeat
from pipeline.runtime.process import process_epoch
from shm.arena import process_ticks

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
    restarts: int = 0  # by the supervisor
    parent: int = 0  # pid: the supervisor, if there is one
    alive: bool = True  # set by the reader
    progressed: float = 0.0  # s since 1970: when `progress` was seen to have grown; 0.0: never


class StatusFile:
    """The writer's side."""

    def __init__(self, run_dir: Path, stage: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = run_dir / f"{stage}.status"
        self._temporary = run_dir / f".{stage}.status.new"
        self._clock = clock
        self._started = clock()
        self._ticks = process_ticks(os.getpid())
        self._next = float("-inf")
        self._last: tuple[object, ...] = ()  # what stands there
        self._has_failed = False
        self._progress = 0
        self._progressed = 0.0

    def write(self, beat: Heartbeat) -> None:
        """At most every 500 ms, and at once when readiness changes. What a full disk refuses is written later."""
        now = self._clock()
        if beat.progress != self._progress:
            self._progress, self._progressed = beat.progress, round(time.time(), 3)
        urgent = (beat.ready, beat.reason)
        state = (*urgent, beat.busy, beat.progress)
        if state == self._last or (now < self._next and (urgent == self._last[:2] or self._has_failed)):
            return
        self._next = now + INTERVAL_S
        record = StageStatus(
            beat.stage,
            os.getpid(),
            self._ticks,
            process_epoch(),
            round(now - self._started, 3),
            beat.progress,
            beat.busy,
            beat.ready,
            beat.reason,
            round(time.time(), 3),
            int(os.environ.get("STARLING_RESTARTS", "0")),
            os.getppid(),
            progressed=self._progressed,
        )
        try:
            self._temporary.write_bytes(msgspec.json.encode(record))
            os.replace(self._temporary, self.path)
            self._last, self._has_failed = state, False
        except OSError:
            self._has_failed = True

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def read_all(run_dir: Path) -> list[StageStatus]:
    """Every stage's last record, by name; `alive` is False for one whose process is gone.

    Raises `PermissionError` where the directory is another user's: none found is not none there.
    """
    records = []
    try:
        names = sorted(name for name in os.listdir(run_dir) if name.endswith(".status") and name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        try:
            record = msgspec.json.decode((run_dir / name).read_bytes(), type=StageStatus)
        except (OSError, msgspec.DecodeError):
            continue
        alive = process_ticks(record.pid) == record.ticks
        records.append(msgspec.structs.replace(record, alive=alive))
    return records
