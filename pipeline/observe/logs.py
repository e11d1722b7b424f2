"""Log lines: JSON or for people, with the ids that tie them together, bounded and never waited for.

    log = logging.getLogger("starling.kv")
    log.info("page dropped", extra={"model": name, "page": page})

The message is the *event*: a constant; what varies goes into `extra` (request_id, session_id, model,
timings, ...).  Lines go to stderr, which is opened anew without blocking: a reader who has gone to sleep
(a terminal with ^S) costs lines, which are counted, and never time.  And to STARLING_HOME/logs/STAGE.log,
always as JSON, rotated at `logging.max_size_mb`, `logging.max_files` of them.

Each event has a budget: `BURST` lines at once, `PER_SECOND` after that.  The next line that passes says
how many did not (`suppressed`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import paths
from pipeline.config.schema import Config

BURST = 100
PER_SECOND = 20.0
MAX_EVENTS = 512  # with budgets of their own; all others share one
MAX_LINE_BYTES = 16_384
MAX_VALUE_CHARS = 2_000

_NOT_EXTRA = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "suppressed", "admitted"}
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup(stage: str, config: Config, directory: Path | None = None) -> None:
    """Send all `starling.*` records, and warnings of libraries, to stderr and the stage's file.

    May be called again, after a fork under another name: the handlers before are replaced.
    """
    shown: logging.Formatter = JsonFormatter(stage)
    if config.logging.format == "pretty":
        shown = PrettyFormatter(stage)
    handlers: list[logging.Handler] = [LineHandler(Output(sys.stderr.fileno()), shown)]
    file = RotatingFile(
        (directory or paths.logs_dir()) / f"{stage}.log",
        config.logging.max_size_mb << 20,
        config.logging.max_files,
    )
    handlers.append(LineHandler(file, JsonFormatter(stage)))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, LineHandler)]:
        root.removeHandler(old)
        old.close()
    budget = Budget()
    for handler in handlers:
        handler.addFilter(budget.admits)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("starling").setLevel(_LEVELS[config.logging.level])
    logging.captureWarnings(True)


# ------------------------------------------------------------------ form


def fields(record: logging.LogRecord, stage: str) -> dict[str, Any]:
    """The line as a mapping: ts, level, stage, pid, event, then what came in `extra`."""
    line: dict[str, Any] = {
        "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "stage": stage,
        "pid": record.process,
        "event": _short(record.getMessage()),
    }
    for key, value in vars(record).items():
        if key not in _NOT_EXTRA:
            line[key] = _short(value)
    suppressed = getattr(record, "suppressed", 0)
    if suppressed:
        line["suppressed"] = suppressed
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        line["error"] = type(error).__name__
        line["message"] = _short(str(error))
        # The end of a stack says where it happened.
        line["stack"] = "".join(traceback.format_exception(error))[-8_000:]
    return line


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        return value[:MAX_VALUE_CHARS] + f"... ({len(value)} characters)"
    return value


class JsonFormatter(logging.Formatter):
    """One JSON object."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(fields(record, self.stage), ensure_ascii=False, default=repr)


class PrettyFormatter(logging.Formatter):
    """`12:00:01.123 INFO  kv  event  key=value ...`, and a stack on lines of its own."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def format(self, record: logging.LogRecord) -> str:
        return pretty(fields(record, self.stage))


def pretty(line: dict[str, Any]) -> str:
    """A line's fields for people; a line of a file may lack any of them."""
    shown = dict(line)
    ts, level, stage, event = (str(shown.pop(key, "")) for key in ("ts", "level", "stage", "event"))
    stack = str(shown.pop("stack", ""))
    shown.pop("pid", None)
    text = f"{ts[11:23]} {level.upper():<7} {stage}  {event}"
    text += "".join(f"  {key}={value}" for key, value in shown.items())
    # Whatever a client has sent must not reach a terminal as control characters.
    return "\n".join(map(_printable, [text, *stack.splitlines()]))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# ------------------------------------------------------------------ volume


class Budget:
    """A token bucket for each event (logger, level, message before its arguments)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[object, list[float]] = {}  # tokens, last time, suppressed

    def admits(self, record: logging.LogRecord) -> bool:
        """Called by every handler of a record; decides once, and notes `suppressed` in it."""
        decided: bool | None = getattr(record, "admitted", None)
        if decided is None:
            decided = self._decide(record)
            record.admitted = decided
        return decided

    def _decide(self, record: logging.LogRecord) -> bool:
        key: object = (record.name, record.levelno, record.msg if isinstance(record.msg, str) else "")
        if key not in self._buckets and len(self._buckets) >= MAX_EVENTS:
            key = None
        now = self._clock()
        bucket = self._buckets.setdefault(key, [float(BURST), now, 0])
        bucket[0] = min(float(BURST), bucket[0] + (now - bucket[1]) * PER_SECOND)
        bucket[1] = now
        if bucket[0] < 1:
            bucket[2] += 1
            return False
        bucket[0] -= 1
        record.suppressed = int(bucket[2])
        bucket[2] = 0
        return True


# ------------------------------------------------------------------ where it goes


class LineHandler(logging.Handler):
    """Formats and writes; neither waits nor raises."""

    def __init__(self, output: Output | RotatingFile, formatter: logging.Formatter) -> None:
        super().__init__()
        self._output = output
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "replace")
        except Exception:  # a value whose repr fails: the event still counts
            line = json.dumps({"event": "log record could not be formatted", "logger": record.name}).encode()
        if len(line) > MAX_LINE_BYTES:
            line = line[:MAX_LINE_BYTES] + b"... (cut)"
        self._output.write(line + b"\n")

    def close(self) -> None:
        self._output.close()
        super().close()


class Output:
    """A descriptor (stderr) written without waiting. `lost`: lines there was no room for."""

    def __init__(self, fd: int) -> None:
        self.lost = 0
        self._rest = b""  # of a line of which only the beginning found room
        self._socket: socket.socket | None = None
        kind = os.fstat(fd).st_mode
        if stat.S_ISSOCK(kind):  # the journal
            self._fd = os.dup(fd)
            self._socket = socket.socket(fileno=self._fd)
        elif stat.S_ISREG(kind):
            self._fd = os.dup(fd)  # opened anew it would have an offset of its own
        else:
            # O_NONBLOCK on the descriptor we were given would be seen by everyone who shares it.
            try:
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            except OSError:
                self._fd = os.dup(fd)

    def write(self, line: bytes) -> None:
        """One line, or nothing."""
        if self._rest:
            self._rest = self._rest[self._put(self._rest) :]
            if self._rest:
                self.lost += 1
                return
        if self.lost:
            line = b'{"event": "log lines lost", "lines": %d}\n' % self.lost + line
        sent = self._put(line)
        if sent == 0:
            self.lost += 1
            return
        self.lost = 0
        self._rest = line[sent:]

    def _put(self, data: bytes) -> int:
        try:
            if self._socket is not None:
                return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return os.write(self._fd, data)
        except OSError:  # no room, or no reader any more
            return 0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class RotatingFile:
    """PATH, PATH.1, ... `files` of them, at most `max_bytes` each. Opened at the first line.

    One process writes a name at a time (the stage's lock sees to it).  A disk that is full or gone
    costs lines, counted in `lost`.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.path = path
        self.lost = 0
        self._max_bytes = max_bytes
        self._files = files
        self._fd = -1
        self._size = 0

    def write(self, line: bytes) -> None:
        """Append one line, after rotating when it would not fit."""
        try:
            if self._fd < 0:
                self._open()
            if self._size and self._size + len(line) > self._max_bytes:
                self._rotate()
            self._size += os.write(self._fd, line)
        except OSError:
            self.lost += 1

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        os.close(self._fd)
        self._fd = -1
        names = [self.path, *(Path(f"{self.path}.{i}") for i in range(1, self._files))]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if newer.exists():
                os.replace(newer, older)
        if self._files == 1:
            self.path.unlink(missing_ok=True)
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
