"""Log lines: form, bounds, and that no stage waits for a reader."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from pipeline.config.schema import Config, LoggingConfig
from pipeline.observe import logs
from pipeline.observe.log_format import JsonFormatter, PrettyFormatter
from pipeline.observe.log_output import Output, RotatingFile
from pipeline.observe.logs import BURST, PER_SECOND, REPORT_S, Budget, LineHandler


def record(message: str = "page dropped", level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "starling.kv", "levelno": level, "msg": message, **extra})
    made.levelname = logging.getLevelName(level)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def lost_line(lines: int) -> bytes:
    return b"%d lost\n" % lines


# ------------------------------------------------------------------ form


def test_a_json_line() -> None:
    made = record(request_id="req-1", model="m", timings={"queue_ms": 3.5})
    line = json.loads(JsonFormatter("kv").format(made))
    assert line == {
        "ts": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "stage": "kv",
        "pid": os.getpid(),
        "event": "page dropped",
        "request_id": "req-1",
        "model": "m",
        "timings": {"queue_ms": 3.5},
    }


def test_an_error_has_message_and_stack() -> None:
    try:
        raise ValueError("no such page")
    except ValueError as error:
        made = record(level=logging.ERROR, exc_info=(ValueError, error, error.__traceback__))
    line = json.loads(JsonFormatter("kv").format(made))
    assert (line["error"], line["message"]) == ("ValueError", "no such page")
    assert "test_logs.py" in line["stack"]
    pretty = PrettyFormatter("kv").format(made)
    assert "error=ValueError" in pretty.splitlines()[0]
    assert "Traceback" in pretty.splitlines()[1]


@pytest.mark.parametrize("is_cause", [False, True])
def test_what_a_client_sent_is_in_no_line(is_cause: bool) -> None:
    """aiohttp's errors quote the bytes that it could not parse: a header with a key, or a part of a prompt."""
    error: Exception = BadHttpMessage("Invalid header value char:\n\n    b'X-Api-Key: the-key\\x01'")
    if is_cause:
        cause, error = error, ConnectionError("the peer sent the-key")
        error.__cause__ = cause
    made = record("Error handling request from %s", args=("192.0.2.1",), exc_info=(type(error), error, None))
    made.name = "aiohttp.server"
    for formatter in (JsonFormatter("gateway"), PrettyFormatter("gateway")):
        text = formatter.format(made)
        assert "the-key" not in text
        assert type(error).__name__ in text and "192.0.2.1" in text


def test_what_a_client_sent_is_in_no_line_of_asyncio_or_of_a_group() -> None:
    cause = BadHttpMessage("Invalid header value char:\n\n    b'X-Api-Key: the-key\\x01'")
    lost = record(f"Task exception was never retrieved: {cause!r}", exc_info=(type(cause), cause, None))
    lost.name = "asyncio"
    group = ExceptionGroup("tasks", [ValueError("other"), ExceptionGroup("more", [cause])])
    grouped = record("failed", exc_info=(type(group), group, None))
    for made in (lost, grouped):
        text = JsonFormatter("gateway").format(made)
        assert "the-key" not in text and type(made.exc_info[1]).__name__ in text


def test_a_pretty_line_has_no_control_characters() -> None:
    text = PrettyFormatter("kv").format(record(user="\x1b[31mred\r\nforged line"))
    assert text == r"22:13:20.250 INFO    kv  page dropped  user=\x1b[31mred\r\nforged line"


def test_values_and_lines_are_bounded(tmp_path: Path) -> None:
    line = json.loads(JsonFormatter("kv").format(record(text="x" * 1_000_000)))
    assert len(line["text"]) < 2_100
    file = RotatingFile(tmp_path / "kv.log", 1 << 20, 1)
    LineHandler(file, JsonFormatter("kv")).emit(record(request_id="req-1", many=["y" * 100] * 1000))
    file.close()
    written = (tmp_path / "kv.log").read_bytes()
    assert len(written) < logs.MAX_LINE_BYTES
    cut = json.loads(written)  # a line stays one JSON object
    assert (cut["event"], cut["request_id"]) == ("page dropped", "req-1")
    assert cut["cut_bytes"] > 100_000


def test_no_field_replaces_what_every_line_has() -> None:
    line = json.loads(JsonFormatter("kv").format(record(stage="other", pid=1, event="other", number=float("nan"))))
    assert (line["stage"], line["pid"], line["event"]) == ("kv", os.getpid(), "page dropped")
    assert (line["extra_stage"], line["extra_pid"], line["extra_event"]) == ("other", 1, "other")  # and none is lost
    assert line["number"] == "nan"  # JSON has no such number


def test_a_library_has_one_event_and_its_text_in_a_field() -> None:
    made = record("Task %r failed at %s", name="asyncio", args=("t-1", "/tmp/x"))
    line = json.loads(JsonFormatter("kv").format(made))
    assert (line["event"], line["logger"], line["text"]) == (
        "message of a library",
        "asyncio",
        "Task 't-1' failed at /tmp/x",
    )


def test_a_record_that_cannot_be_formatted_is_still_logged(tmp_path: Path) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    file = RotatingFile(tmp_path / "kv.log", 1 << 20, 1)
    LineHandler(file, JsonFormatter("kv")).emit(record(value=Broken()))
    file.close()
    line = json.loads((tmp_path / "kv.log").read_bytes())
    assert (line["event"], line["of"]) == ("log record could not be formatted", "page dropped")
    assert (line["stage"], line["pid"]) == ("kv", os.getpid())


# ------------------------------------------------------------------ volume


def test_an_event_has_a_budget_and_reports_suppressed_lines() -> None:
    now = [0.0]
    budget = Budget(lambda: now[0])
    admitted = [budget.admits(record()) for _ in range(BURST * 3)]
    assert admitted == [True] * BURST + [False] * BURST * 2
    assert budget.admits(record("another event"))
    now[0] += 1 / PER_SECOND
    late = record()
    assert budget.admits(late)
    assert json.loads(JsonFormatter("kv").format(late))["suppressed"] == BURST * 2
    assert not budget.admits(record())


def test_a_line_that_has_no_place_need_not_be_made_and_is_counted() -> None:
    now = [0.0]
    budget = Budget(lambda: now[0])
    event = record().name, record().levelno, record().msg
    for _ in range(BURST):
        assert not budget.suppresses(*event)  # which uses nothing up
        assert budget.admits(record())
    assert budget.suppresses(*event) and not budget.admits(record()) and budget.suppresses(*event)
    now[0] += 1 / PER_SECOND
    late = record()
    assert not budget.suppresses(*event) and budget.admits(late)
    assert json.loads(JsonFormatter("kv").format(late))["suppressed"] == 3


def test_a_record_is_counted_once_for_all_handlers() -> None:
    budget = Budget(lambda: 0.0)
    for _ in range(BURST):
        made = record()
        assert budget.admits(made)
        assert budget.admits(made)
    assert not budget.admits(record())


def test_the_number_of_budgets_is_bounded() -> None:
    budget = Budget(lambda: 0.0)
    admitted = sum(budget.admits(record(f"event {i}")) for i in range(10_000))
    assert admitted == logs.MAX_EVENTS + BURST


def test_the_end_of_a_flood_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Also if the event never comes again."""
    now = [0.0]
    budget = Budget(lambda: now[0])
    for _ in range(BURST + 7):
        budget.admits(record())
    with caplog.at_level(logging.INFO, "starling.kv"):
        budget.report()
        assert not caplog.records  # the flood may go on
        now[0] += REPORT_S
        budget.report()
        budget.report()
    (reported,) = caplog.records
    line = json.loads(JsonFormatter("kv").format(reported))
    assert (reported.name, line["event"], line["of"], line["lines"]) == (
        "starling.kv",
        "log lines suppressed",
        "page dropped",
        7,
    )
    late = record()
    assert budget.admits(late)
    assert "suppressed" not in json.loads(JsonFormatter("kv").format(late))


# ------------------------------------------------------------------ where it goes


def test_a_stopped_reader_costs_lines_and_no_time() -> None:
    read_end, write_end = os.pipe()
    output = Output(write_end, lost_line)
    for i in range(20_000):
        output.write(b"%06d %s\n" % (i, b"x" * 90))
    assert output.lost > 0
    lost = output.lost
    got = os.read(read_end, 1 << 20)
    assert got.startswith(b"000000 ")
    output.write(b"awake again\n")
    os.set_blocking(read_end, False)
    got += os.read(read_end, 1 << 20)
    lines = got.decode().splitlines()
    assert lines[-1] == "awake again"
    assert lines[-2] == f"{lost} lost"
    assert all(line.endswith("x" * 90) for line in lines[:-2])
    assert len(lines) - 2 + lost == 20_000
    assert os.get_blocking(write_end)  # the descriptor that others share is as it was
    output.close()
    os.close(read_end)
    os.close(write_end)


def test_a_closed_reader_is_no_error() -> None:
    read_end, write_end = os.pipe()
    output = Output(write_end, lost_line)
    os.close(read_end)
    output.write(b"into the void\n")
    assert output.lost == 1
    output.close()
    os.close(write_end)


def test_output_to_a_socket() -> None:
    journal, ours = socket.socketpair()
    output = Output(ours.fileno(), lost_line)
    for _ in range(100_000):
        output.write(b"x" * 100 + b"\n")
    assert output.lost > 0
    assert journal.recv(101) == b"x" * 100 + b"\n"
    output.close()
    journal.close()
    ours.close()


def test_output_to_a_file_appends(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb", buffering=0) as file:
        file.write(b"before\n")
        output = Output(file.fileno(), lost_line)
        output.write(b"line\n")
        file.write(b"after\n")
        output.close()
    assert (tmp_path / "out").read_bytes() == b"before\nline\nafter\n"


def test_files_are_rotated_and_bounded(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "logs" / "kv.log", 100, 3)
    for i in range(100):
        file.write(b"%09d\n" % i)
    file.close()
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["kv.log", "kv.log.1", "kv.log.2"]
    kept = b"".join((tmp_path / "logs" / name).read_bytes() for name in reversed(names))
    assert kept == b"".join(b"%09d\n" % i for i in range(70, 100))
    again = RotatingFile(tmp_path / "logs" / "kv.log", 100, 3)
    again.write(b"next\n")
    again.close()
    assert (tmp_path / "logs" / "kv.log").read_bytes() == b"next\n"


def test_a_file_says_how_many_lines_it_lost(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    file = RotatingFile(tmp_path / "logs" / "kv.log", 1 << 20, 3, lost_line)
    file.write(b"first\n")
    file.write(b"second\n")
    (tmp_path / "logs").unlink()
    file.write(b"third\n")
    file.write(b"fourth\n")
    file.close()
    assert (tmp_path / "logs" / "kv.log").read_bytes() == b"2 lost\nthird\nfourth\n"
    assert file.lost == 2


@pytest.mark.parametrize("emptied", [False, True])
def test_a_disk_that_fills_within_a_line_tears_none(tmp_path: Path, emptied: bool) -> None:
    """A write is cut where the disk is full: the rest of the line would be what is written when there is room again.

    emptied: an operator, or logrotate with copytruncate, has emptied the file before.
    """
    path = tmp_path / "stage.log"
    file = RotatingFile(path, 1 << 20, 2, lost_line)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        file.write(b"first\n" * (1 + 9 * emptied))
        if emptied:
            os.truncate(path, len(b"first\n"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # as a disk with room for four bytes
        file.write(b"second\n")
        file.write(b"third\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == b"first\n"
    file.write(b"fourth\n")
    file.close()
    assert path.read_bytes() == b"first\n2 lost\nfourth\n"


def test_a_single_file_is_replaced(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "kv.log", 20, 1)
    for i in range(5):
        file.write(b"%09d\n" % i)
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kv.log"]
    assert (tmp_path / "kv.log").read_bytes() == b"%09d\n" % 4


def test_a_file_that_another_process_has_rotated_is_left(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    quiet, busy = (RotatingFile(path, 1000, 3) for _ in range(2))
    quiet.write(b"first\n")
    for i in range(100):
        busy.write(b"%099d\n" % i)
    quiet.write(b"last\n")
    quiet.close()
    busy.close()
    assert path.read_bytes().endswith(b"last\n")


def test_the_bound_is_that_of_all_processes(tmp_path: Path) -> None:
    writers = [RotatingFile(tmp_path / "worker.log", 1000, 3) for _ in range(2)]
    for i in range(9):
        for file in writers:
            file.write(b"%099d\n" % i)
    for file in writers:
        file.close()
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == [800, 1000]


def test_processes_that_write_at_once_lose_no_line(tmp_path: Path) -> None:
    """Two files, and for each a fork that shares its descriptor: 8,000 bytes in files of 1,000."""
    lines = {b"%d %07d\n" % (number, i) for number in range(4) for i in range(200)}

    def write(file: RotatingFile, number: int) -> None:
        for i in range(200):
            file.write(b"%d %07d\n" % (number, i))

    children = []
    for number in (0, 2):
        file = RotatingFile(tmp_path / "worker.log", 1000, 30)
        file.write(b"a file is open\n")
        for own in (number, number + 1):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    write(file, own)
                    os._exit(file.lost)
                finally:
                    os._exit(99)
        file.close()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    files = [path.read_bytes() for path in tmp_path.iterdir()]
    found = [line for text in files for line in text.splitlines(keepends=True)]
    assert sorted(line for line in found if line in lines) == sorted(lines)
    assert len(found) == len(lines) + 2
    assert len(files) < 12


def test_the_processes_of_one_stage_write_one_file(root: logging.Logger, tmp_path: Path) -> None:
    """Each worker group has its own process, and `starling logs worker` shows the lines of all."""
    config = Config(logging=LoggingConfig(level="info", format="json", max_size_mb=1, max_files=2))
    logs.setup("worker", config, tmp_path)
    log = logging.getLogger("starling.worker")
    log.info("ready", extra={"model": "quiet"})
    child = os.fork()
    if child == 0:
        try:
            logs.setup("worker", config, tmp_path)
            for i in range(700):  # of 2,000 bytes: more than a file
                logging.getLogger(f"starling.worker.{i}").info("ready", extra={"model": "x" * 2000})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    log.info("stopped", extra={"model": "quiet"})
    last = json.loads((tmp_path / "worker.log").read_text().splitlines()[-1])
    assert (last["event"], last["model"], last["pid"]) == ("stopped", "quiet", os.getpid())


def test_an_impossible_directory_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    file = RotatingFile(tmp_path / "logs" / "kv.log", 100, 3)
    file.write(b"line\n")
    assert file.lost == 1


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before, level = list(logger.handlers), logger.level
    starling = logging.getLogger("starling").level
    yield logger
    for handler in [handler for handler in logger.handlers if handler not in before]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logging.getLogger("starling").setLevel(starling)
    logging.captureWarnings(False)


def test_setup_twice_writes_each_line_once_under_the_new_name(root: logging.Logger, tmp_path: Path) -> None:
    config = Config(logging=LoggingConfig(level="info", format="json"))
    logs.setup("kv-supervisor", config, tmp_path)
    logs.setup("kv", config, tmp_path)
    logging.getLogger("starling.kv").info("ready", extra={"model": "m"})
    logging.getLogger("starling.kv").debug("not shown")
    logging.getLogger("some.library").info("not shown")
    logging.getLogger("some.library").warning("shown")
    lines = [json.loads(line) for line in (tmp_path / "kv.log").read_text().splitlines()]
    shown = [(line["stage"], line["event"], line.get("text")) for line in lines]
    assert shown == [("kv", "ready", None), ("kv", "message of a library", "shown")]
    assert not (tmp_path / "kv-supervisor.log").exists()


def test_a_log_that_cannot_be_rotated_keeps_its_bound_and_the_latest_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARLING_FAULTS", "disk:eacces@logs_rename")
    file = RotatingFile(tmp_path / "a.log", 64, 3)
    for i in range(20):
        file.write(b"line %d\n" % i)
    assert file.lost == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]
    content = (tmp_path / "a.log").read_bytes()
    assert content.endswith(b"line 19\n")
    assert len(content) <= 64
    file.close()
