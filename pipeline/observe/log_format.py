"""The form of a log line: JSON, or text for people.

`event` is a constant, so that lines can be counted and searched by it.  Libraries format their messages themselves:
their lines have one event, `message of a library`, and the text in a field.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import traceback
from typing import Any

MAX_VALUE_CHARS = 2_000  # longer strings are cut
MAX_STACK_CHARS = 8_000  # the end of a stack trace, which shows where the error occurred

LIBRARY_EVENT = "message of a library"
OURS = "starling"  # the logger above all of this server's
# What is left of a line that is too long.
KEPT = ("ts", "level", "stage", "pid", "event", "request_id", "session_id", "model", "tenant")

# Its errors quote bytes that a client has sent and that are no HTTP: a header with a key, a part of a prompt.
_QUOTING = "aiohttp.http_exceptions"
_SHOWING = "asyncio"  # the logger whose text has the error

_NOT_EXTRA = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "suppressed", "admitted"}


def fields(record: logging.LogRecord, stage: str) -> dict[str, Any]:
    """The line as a mapping: ts, level, stage, pid, event, then the fields of `extra` (a `stage` as `extra_stage`)."""
    is_ours = record.name.partition(".")[0] == OURS
    line: dict[str, Any] = {
        "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "stage": stage,
        "pid": record.process,
        "event": _short(record.getMessage()) if is_ours else LIBRARY_EVENT,
    }
    error = record.exc_info[1] if record.exc_info else None
    is_quoting = _quotes(error)
    if not is_ours:
        line["logger"] = record.name
        if not (is_quoting and record.name == _SHOWING):
            line["text"] = _short(record.getMessage())
    for key, value in vars(record).items():
        if key not in _NOT_EXTRA:  # no field replaces the stage, the pid or the event
            line[f"extra_{key}" if key in line else key] = _short(value)
    suppressed = getattr(record, "suppressed", 0)
    if suppressed:
        line["suppressed"] = suppressed
    if error is not None:
        line["error"] = type(error).__name__
        if not is_quoting:
            line["message"] = _short(str(error))
            line["stack"] = "".join(traceback.format_exception(error))[-MAX_STACK_CHARS:]
    return line


def _quotes(error: BaseException | None) -> bool:
    """Whether the error, one that it comes from, or one of its group, quotes what a client has sent."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        if type(error).__module__ == _QUOTING:
            return True
        seen.add(id(error))
        errors += [error.__cause__, error.__context__]
        errors += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return False


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        return value[:MAX_VALUE_CHARS] + f"... ({len(value)} characters)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    return value


def line_of(event: str, stage: str, **facts: Any) -> dict[str, Any]:
    """A line about the log itself, which no record has."""
    made = logging.makeLogRecord({"name": OURS, "levelno": logging.WARNING, "msg": event, **facts})
    made.levelname, made.process = "WARNING", os.getpid()
    return fields(made, stage)


class LineFormatter(logging.Formatter):
    """Of one stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def text(self, line: dict[str, Any]) -> str:
        """The text of a line."""
        raise NotImplementedError

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        return self.text(fields(record, self.stage))

    def note(self, event: str, **facts: Any) -> str:
        """A line about the log itself."""
        return self.text(line_of(event, self.stage, **facts))


class JsonFormatter(LineFormatter):
    """One JSON object per line."""

    def text(self, line: dict[str, Any]) -> str:
        """The line as JSON."""
        return json.dumps(line, ensure_ascii=False, default=repr)


class PrettyFormatter(LineFormatter):
    """`12:00:01.123 INFO  kv  event  key=value ...`, followed by the lines of a stack trace."""

    def text(self, line: dict[str, Any]) -> str:
        """The line for people."""
        return pretty(line)


def pretty(line: dict[str, Any]) -> str:
    """A line's fields as text. Any of them may be missing."""
    shown = dict(line)
    ts, level, stage, event = (str(shown.pop(key, "")) for key in ("ts", "level", "stage", "event"))
    stack = str(shown.pop("stack", ""))
    shown.pop("pid", None)
    text = f"{ts[11:23]} {level.upper():<7} {stage}  {event}"
    text += "".join(f"  {key}={value}" for key, value in shown.items())
    # Text from clients must not reach a terminal as control characters.
    return "\n".join(map(_printable, [text, *stack.splitlines()]))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
