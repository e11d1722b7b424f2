"""Points at which faults can be made to happen on purpose. Without a plan a point is one `None` to look at.

    self._fault = points.fault_point("disk", "spill")
    ...
    if self._fault.trigger is not None: self._fault.trigger(number)

A plan comes from the environment at the start (`STARLING_FAULTS`), or from the file `RUN_DIR/faults` while the
server runs (`starling chaos`), for as long as the process that wrote it lives.  What a plan means is known
to pipeline/faults/plan.py, which is imported when there is one and at no other time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

VARIABLE = "STARLING_FAULTS"
FILE = "faults"  # in the run directory: "PID TICKS\n" of its author, then the plan

Trigger = Callable[[int], bool]  # (number of the event) -> whether the caller is to drop the thing


class FaultPoint:
    """`strike(number)` at each event, if it is not None."""

    __slots__ = ("name", "place", "trigger")

    def __init__(self, place: str, name: str) -> None:
        self.place, self.name = place, name
        self.trigger: Trigger | None = None


_points: dict[tuple[str, str], FaultPoint] = {}
_live = ""  # the plan of the file


def fault_point(place: str, name: str) -> FaultPoint:
    """The process's one point of that name."""
    found = _points.get((place, name))
    if found is None:
        found = _points[place, name] = FaultPoint(place, name)
    _arm(found)
    return found


class LivePlanFollower:
    """Looks after `RUN_DIR/faults` for a process: call `poll` every 100 ms."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE

    def poll(self) -> None:
        global _live
        if not _live:
            try:
                os.stat(self._path)
            except OSError:
                return
        from pipeline.faults import plan as faultplan

        plan = faultplan.live(self._path)
        if plan != _live:
            _live = plan
            for known in _points.values():
                _arm(known)


def _arm(point: FaultPoint) -> None:
    plan = os.environ.get(VARIABLE, "")
    if not plan and not _live:
        point.trigger = None
        return
    from pipeline.faults import plan as faultplan

    point.trigger = faultplan.hook(point.place, point.name, plan, _live)
