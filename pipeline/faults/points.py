"""Fault points: where a fault plan can inject faults. Without a plan a point costs one comparison with `None`.

    self._fault = points.fault_point("disk", "spill")
    ...
    if self._fault.trigger is not None: self._fault.trigger(number)

`DiskPoints` are the points of one kind of state file, one for each operation.

A plan comes from the environment at the start (`STARLING_FAULTS`), or from the file `RUN_DIR/faults` while the
server runs (`starling chaos`), for as long as the process that wrote the file lives.  The meaning of plans is in
pipeline/faults/plan.py, which is imported only when there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pipeline.faults import VARIABLE

FILE = "faults"  # in the run directory: "PID TICKS\n" of the writing process, then the plan

Trigger = Callable[..., bool]  # (number of the event) -> whether the caller must drop the frame or record


class FaultPoint:
    """Call `trigger(number)` at each event, unless it is None."""

    __slots__ = ("counts", "name", "place", "trigger")

    def __init__(self, place: str, name: str) -> None:
        self.place, self.name = place, name
        self.trigger: Trigger | None = None
        self.counts: dict[str, int] = {}  # events since the plan was installed

    def count(self, what: str = "", detail: str = "") -> None:
        """The next event of a phase; with `what` each sequence has its own numbers."""
        if self.trigger is not None:
            number = self.counts[what] = self.counts.get(what, 0) + 1
            self.trigger(number, detail)

    def hit(self) -> None:
        """An event without a number: raises the planned `OSError`, or takes the planned time."""
        if self.trigger is not None:
            self.trigger(0)


class DiskPoints:
    """The points of one kind of state file, a key of `faults.STATE_FILES`. Call `hit` before the operation."""

    def __init__(self, files: str) -> None:
        self.write = fault_point("disk", files)
        self.read, self.open, self.sync, self.rename, self.unlink = (
            fault_point("disk", f"{files}_{operation}") for operation in ("read", "open", "sync", "rename", "unlink")
        )


_points: dict[tuple[str, str], FaultPoint] = {}
_installed = ""  # the plan in the file
_installed_path: Path | None = None


def fault_point(place: str, name: str) -> FaultPoint:
    """The point of that name; one object per process."""
    found = _points.get((place, name))
    if found is None:
        found = _points[place, name] = FaultPoint(place, name)
    _arm(found)
    return found


class LivePlanFollower:
    """Follows `RUN_DIR/faults` for this process: call `poll` at each tick."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._path_name = os.fspath(self._path)

    def poll(self) -> None:
        """Arm all points when the plan has changed."""
        global _installed, _installed_path
        if not _installed and not os.access(self._path_name, os.F_OK):
            return
        from pipeline.faults import plan as fault_plan

        plan = fault_plan.read_installed(self._path)
        if plan != _installed:
            _installed = plan
            _installed_path = self._path
            for known in _points.values():
                _arm(known)
            if plan:
                fault_plan.record_armed(self._path)


def _arm(point: FaultPoint) -> None:
    plan = os.environ.get(VARIABLE, "")
    point.counts.clear()
    if not plan and not _installed:
        point.trigger = None
        return
    from pipeline.faults import plan as fault_plan

    point.trigger = fault_plan.build_trigger(point.place, point.name, plan, _installed, installed=_installed_path)
