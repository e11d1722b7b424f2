"""The events of the log, read from the sources: each is a constant text in a call of a logger."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.observe.log_format import LIBRARY_EVENT

ROOT = Path(__file__).parents[1]
PACKAGES = ("shm", "pipeline", "stages", "starling")
METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "note"})


class LogCall(NamedTuple):
    """A call of a logger, or a note of the log about itself."""

    where: str  # PATH:LINE
    event: ast.expr
    n_values: int  # positional arguments after the event
    extra: ast.expr | None


def log_calls(source: str, name: str) -> Iterator[LogCall]:
    """The calls in a module."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
            continue
        target = ast.unparse(node.func.value)
        is_note = node.func.attr == "note" and target in ("formatter", "self._lines")
        if not (is_note or target.endswith("log") or "getLogger(" in target):
            continue
        arguments = node.args[1:] if node.func.attr == "log" else node.args
        if arguments:
            extra = next((one.value for one in node.keywords if one.arg == "extra"), None)
            yield LogCall(f"{name}:{node.lineno}", arguments[0], len(arguments) - 1, extra)


@functools.cache
def all_calls() -> tuple[LogCall, ...]:
    """The calls in all packages of the product."""
    return tuple(
        call
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for call in log_calls(path.read_text(), str(path.relative_to(ROOT)))
    )


def all_events() -> frozenset[str]:
    """Every event that a line can have."""
    found = {call.event.value for call in all_calls() if isinstance(call.event, ast.Constant)}
    return frozenset({LIBRARY_EVENT, *(event for event in found if isinstance(event, str))})
