"""Points at which faults can be made to happen on purpose. Without a plan a point is one `None` to look at.

    self._fault = points.point("disk", "spill")
    ...
    if self._fault.strike is not None: self._fault.strike(number)

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

Strike = Callable[[int], bool]  # (number of the event) -> whether the caller is to drop the thing


class Point:
    """`strike(number)` at each event, if it is not None."""

    __slots__ = ("name", "place", "strike")

    def __init__(self, place: str, name: str) -> None:
        self.place, self.name = place, name
        self.strike: Strike | None = None


_points: dict[tuple[str, str], Point] = {}
_live = ""  # the plan of the file


def point(place: str, name: str) -> Point:
    """The process's one point of that name."""
    found = _points.get((place, name))
    if found is None:
        found = _points[place, name] = Point(place, name)
    _arm(found)
    return found


class Follower:
    """Looks after `RUN_DIR/faults` for a process: call `look` every 100 ms."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE

    def look(self) -> None:
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


def _arm(point: Point) -> None:
    plan = os.environ.get(VARIABLE, "")
    if not plan and not _live:
        point.strike = None
        return
    from pipeline.faults import plan as faultplan

    point.strike = faultplan.hook(point.place, point.name, plan, _live)
