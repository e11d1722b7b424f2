"""Logging: JSON or text lines with the ids that connect them, bounded in volume, and never blocking.

    log = logging.getLogger("starling.kv")
    log.info("page dropped", extra={"model": name, "page": page})

The message is the *event*, a constant; what varies goes into `extra` (request_id, session_id, model, timings, ...).
Lines go to stderr, which is reopened in non-blocking mode: a reader that has stopped reading (a terminal with ^S)
costs lines, which are counted, and never time.  They also go to STARLING_HOME/logs/STAGE.log, always as JSON,
rotated at `logging.max_size_mb`, with `logging.max_files` files.  Every stage has a thread for that; the worker's
starts when it has forked its ranks, and its lines wait until then.

Each event has a budget: `BURST` lines at once, then `PER_SECOND`.  The next line that passes reports how many
were suppressed; if none comes within `REPORT_S`, a line of its own does.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.observe.background_file import BackgroundFile
from pipeline.observe.log_format import KEPT, JsonFormatter, LineFormatter, PrettyFormatter, fields
from pipeline.observe.log_levels import LEVELS
from pipeline.observe.log_output import Output, RotatingFile

BURST = 100
PER_SECOND = 20.0
MAX_EVENTS = 512  # events with a budget of their own; all others share one
MAX_LINE_BYTES = 16_384
REPORT_S = 10.0  # after the last suppressed line of an event


def setup(
    stage: str, config: Config, directory: Path | None = None, *, in_background: bool = False, is_held: bool = False
) -> None:
    """Send all `starling.*` records, and warnings of libraries, to stderr and the stage's file.

    May be called again, for example after a fork under another name; it replaces the handlers.  `in_background`: a
    thread writes the file, for processes that must not wait for a disk.  `is_held`: it starts with `start_writing`, for
    a process that will be forked.
    """
    stored = JsonFormatter(stage)
    shown: LineFormatter = PrettyFormatter(stage) if config.logging.format == "pretty" else stored
    handlers: list[logging.Handler] = [LineHandler(Output(sys.stderr.fileno(), _lost(shown)), shown)]
    file = RotatingFile(
        (directory or paths.logs_dir()) / f"{stage}.log",
        config.logging.max_size_mb << 20,
        config.logging.max_files,
        _lost(stored),
    )
    handlers.append(LineHandler(BackgroundFile(file, is_held=is_held) if in_background else file, stored))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, LineHandler)]:
        root.removeHandler(old)
        old.close()
    global _budget
    budget = _budget = Budget()
    for handler in handlers:
        handler.addFilter(budget.admits)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("starling").setLevel(LEVELS[config.logging.level])
    logging.captureWarnings(True)


def _lost(formatter: LineFormatter) -> Callable[[int], bytes]:
    """The line that says how many lines had no place."""
    return lambda lines: formatter.note("log lines lost", lines=lines).encode() + b"\n"


def start_writing() -> None:
    """Let the thread of `setup(is_held=True)` start: this process will not be forked any more."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.start_writing()


# ------------------------------------------------------------------ budgets


_Event = tuple[str, int, str]  # logger, level, message


class Budget:
    """A token bucket per event (logger, level, message without its arguments)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[_Event | None, list[float]] = {}  # tokens, last time, suppressed; None: all others
        self._suppressing: set[_Event | None] = set()  # events with suppressed lines

    def admits(self, record: logging.LogRecord) -> bool:
        """The filter of every handler; decides once per record, and sets its `suppressed`."""
        decided: bool | None = getattr(record, "admitted", None)
        if decided is None:
            decided = self._decide(record)
            record.admitted = decided
        return decided

    def suppresses(self, name: str, level: int, event: str) -> bool:
        """Whether a line of this event has no place now; then it counts as suppressed, and need not be made."""
        key, bucket = self._filled((name, level, event))
        if bucket[0] >= 1:
            return False
        self._suppress(key, bucket)
        return True

    def _decide(self, record: logging.LogRecord) -> bool:
        event = record.msg if isinstance(record.msg, str) else ""
        key, bucket = self._filled((record.name, record.levelno, event))
        if bucket[0] < 1:
            self._suppress(key, bucket)
            return False
        bucket[0] -= 1
        record.suppressed = int(bucket[2])
        bucket[2] = 0
        self._suppressing.discard(key)
        return True

    def _filled(self, key: _Event | None) -> tuple[_Event | None, list[float]]:
        """The event's bucket with the tokens that it has now, and its key."""
        if key not in self._buckets and len(self._buckets) >= MAX_EVENTS:
            key = None
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = [float(BURST), now, 0]
        bucket[0] = min(float(BURST), bucket[0] + (now - bucket[1]) * PER_SECOND)
        bucket[1] = now
        return key, bucket

    def _suppress(self, key: _Event | None, bucket: list[float]) -> None:
        bucket[2] += 1
        self._suppressing.add(key)

    def report(self) -> None:
        """Log how many lines of each event were suppressed, if no line of it has said so for `REPORT_S`."""
        now = self._clock()
        for key in [key for key in self._suppressing if now >= self._buckets[key][1] + REPORT_S]:
            self._suppressing.discard(key)
            lines, self._buckets[key][2] = int(self._buckets[key][2]), 0
            name, level, event = key if key is not None else ("starling.logs", logging.WARNING, "other events")
            logging.getLogger(name).log(level, "log lines suppressed", extra={"of": event, "lines": lines})


_budget: Budget | None = None  # of this process


def tick() -> None:
    """Call now and then: reports what was suppressed."""
    if _budget is not None:
        _budget.report()


def suppresses(log: logging.Logger, level: int, event: str) -> bool:
    """Whether a line of this event would be suppressed, which is counted here: for lines whose fields cost time."""
    return _budget is not None and _budget.suppresses(log.name, level, event)


# ------------------------------------------------------------------ the handler


class LineHandler(logging.Handler):
    """Formats and writes; never blocks or raises."""

    def __init__(self, output: Output | RotatingFile | BackgroundFile, formatter: LineFormatter) -> None:
        super().__init__()
        self._output = output
        self._lines = formatter
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; of one that makes more than `MAX_LINE_BYTES`, only what identifies it."""
        try:
            line = self.format(record).encode("utf-8", "replace")
            if len(line) > MAX_LINE_BYTES:
                found = fields(record, self._lines.stage)
                kept = {key: found[key] for key in KEPT if key in found}
                line = self._lines.text({**kept, "cut_bytes": len(line)}).encode("utf-8", "replace")
        except Exception:  # a value whose repr fails: still log that there was an event
            text = self._lines.note("log record could not be formatted", logger=record.name, of=str(record.msg))
            line = text.encode("utf-8", "replace")
        self._output.write(line + b"\n")

    def start_writing(self) -> None:
        """Let the thread of a `BackgroundFile` start."""
        if isinstance(self._output, BackgroundFile):
            self._output.start_writing()

    def close(self) -> None:
        """Close the output."""
        self._output.close()
        super().close()
