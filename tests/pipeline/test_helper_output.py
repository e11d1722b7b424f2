"""What helper processes print becomes lines of the log: whole, bounded, with the helper's name and pid."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from pipeline.observe.helper_output import LINES_AT_ONCE, MAX_LINE_BYTES, HelperOutput
from pipeline.observe.logs import Budget

log = logging.getLogger("starling.test.helper")


def run(code: str) -> tuple[HelperOutput, int]:
    """A process whose stderr is the pipe, after its end."""
    output = HelperOutput(log, {"helper": "mask"})
    with subprocess.Popen([sys.executable, "-c", code], stderr=output.write_fd) as process:
        output.started(process.pid)
        while output.read():
            pass  # an empty pipe is tried again until its writer has ended
    return output, process.pid


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name.startswith(log.name)]


def test_a_traceback_is_in_the_log_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    output, pid = run("raise ValueError('why')")
    output.close()
    found = lines(caplog)
    assert found[0]["text"] == "Traceback (most recent call last):"
    assert found[-1]["text"] == "ValueError: why"
    assert {(line["msg"], line["helper"], line["helper_pid"]) for line in found} == {
        ("output of a helper process", "mask", pid)
    }


def test_parts_of_lines_are_joined_and_the_last_one_needs_no_end(caplog: pytest.LogCaptureFixture) -> None:
    code = "import os; [os.write(2, part) for part in (b'one tw', b'o\\n\\nthr', b'ee\\xff')]"
    output, _ = run(code)
    output.close()
    output.close()
    assert [line["text"] for line in lines(caplog)] == ["one two", "three\ufffd"]


def test_a_line_without_an_end_is_logged_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    length = 3 * MAX_LINE_BYTES + 5
    output, _ = run(f"import os; os.write(2, b'x' * {length})")
    output.close()
    assert [len(line["text"]) for line in lines(caplog)] == [MAX_LINE_BYTES] * 3 + [5]


def test_a_process_that_is_not_started_leaves_no_descriptor() -> None:
    output = HelperOutput(log, {})
    fds = output.fd, output.write_fd
    output.close()
    assert (output.fd, output.write_fd) == (-1, -1)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            open(fd, "rb").close()


async def test_a_loop_reads_the_pipe_until_its_end(caplog: pytest.LogCaptureFixture) -> None:
    output = HelperOutput(log, {"helper": "parser"})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import os; os.write(2, b'said\\n')", stderr=output.write_fd
    )
    output.started(process.pid)
    output.watch(asyncio.get_running_loop())
    await process.wait()
    while output.is_watched:
        await asyncio.sleep(0)
    assert [line["text"] for line in lines(caplog)] == ["said"]
    output.close()


def test_a_flood_costs_few_lines_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    output = HelperOutput(log, {"helper": "mask"})
    os.write(output.write_fd, b"a\n" * 20_000)
    assert output.read()
    found = lines(caplog)
    assert [line.get("text") for line in found] == ["a"] * LINES_AT_ONCE + [None]
    assert found[-1]["lines_left_out"] == 20_000 - LINES_AT_ONCE
    output.close()
    assert len(lines(caplog)) == LINES_AT_ONCE + 1


def test_a_flood_of_one_plugin_hides_no_line_of_another(caplog: pytest.LogCaptureFixture) -> None:
    budget, outputs = Budget(lambda: 0.0), [HelperOutput(log, {"plugin": name}) for name in ("loud", "other")]
    for output, n_lines in zip(outputs, (20_000, 1)):
        for _ in range(10):
            os.write(output.write_fd, b"a\n" * n_lines)
            assert output.read()
        output.close()
    admitted = [
        vars(record)["plugin"] for record in caplog.records if budget.admits(record) and hasattr(record, "text")
    ]
    assert admitted.count("other") == 10
    assert admitted.count("loud") < 10 * LINES_AT_ONCE
