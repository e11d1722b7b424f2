"""Events of the log are constants, in all sources: what varies is in the fields of a line."""

from __future__ import annotations

import ast
import re

import pytest

from tests.log_events import all_calls, all_events, log_calls

EVENT = re.compile(r"[A-Za-z][A-Za-z ,:;.()\[\]_-]*[A-Za-z)]")  # no digits, quotes, paths or signs of a format
FIXED = frozenset({"ts", "level", "stage", "pid", "event"})  # of every line: no event has such a field of its own


def faults(source: str) -> list[str]:
    """What is wrong with the calls of loggers in a module."""
    return [fault for call in log_calls(source, "x.py") for fault in _faults(call)]


def _faults(call: object) -> list[str]:
    where, event, n_values, extra = call  # type: ignore[misc]
    if not (isinstance(event, ast.Constant) and isinstance(event.value, str)):
        return [f"{where}: the event is not a constant: put what varies into `extra`"]
    found = []
    if n_values:
        found.append(f"{where}: the event has values: put them into `extra`")
    if not EVENT.fullmatch(event.value):
        found.append(f"{where}: {event.value!r} has a digit, a quote or a path: put it into `extra`")
    keys = extra.keys if isinstance(extra, ast.Dict) else []
    found += [f"{where}: {key.value!r} is a field of every line" for key in keys if _is_fixed(key)]
    return found


def _is_fixed(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value in FIXED


def test_events_are_constants_without_values() -> None:
    calls = all_calls()
    assert len(calls) > 200
    assert [fault for call in calls for fault in _faults(call)] == []
    assert {"request", "slow request", "ready", "log lines lost", "message of a library"} < all_events()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('log.warning(f"page {page} dropped")', "not a constant"),
        ('log.warning("page %d dropped" % page)', "not a constant"),
        ('log.warning("page {} dropped".format(page))', "not a constant"),
        ("self._log.error(reason)", "not a constant"),
        ('log.log(level, "page %d dropped", page)', "has values"),
        ('log.info("3 pages dropped")', "has a digit"),
        ('logging.getLogger("starling.kv").info("/tmp/x is full")', "has a digit, a quote or a path"),
        ('log.info("page dropped", extra={"pid": 3})', "is a field of every line"),
    ],
)
def test_other_events_are_found(line: str, reason: str) -> None:
    assert any(reason in fault for fault in faults(line))
    assert faults('log.info("page dropped", extra={"page": page})') == []
