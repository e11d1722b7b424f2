"""Faults in the running process of a home, from the moment at which it follows the plan until it has left it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.faults import points
from pipeline.faults.plan import install, read_armed

NOTHING = "worker:exit@step=1000000000"  # a plan of which nothing happens

Wait = Callable[[Callable[[], object]], object]  # returns when the condition is true, or fails


def begin(home: Path, plan: str, wait: Wait | None) -> None:
    """Install the plan; with `wait`, return when a process follows it."""
    run_dir = home / "run"
    install(run_dir / points.FILE, plan)
    if wait is not None:
        wait(lambda: read_armed(run_dir))


def end(home: Path, wait: Wait | None) -> None:
    """Remove the plan; with `wait`, return when its faults have ended."""
    begin(home, NOTHING, wait)
    (home / "run" / points.FILE).unlink()
