"""What commands print on terminals of several widths."""

from __future__ import annotations

import io
import re
import sys

import pytest

from starling.bench.figures import lines, measure
from starling.bench.load import Run
from starling.cli import tables, terminal
from starling.cli.trace import lines as trace_lines


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_message_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "error_width", lambda: 30)
    path = "/a/path/that/is/longer/than/the/terminal"
    terminal.complain(f"{path} cannot be read; its owner is another user\nrun as that user")
    assert screen.getvalue().splitlines() == [
        "starling:",
        path,
        "cannot be read; its owner is",
        "another user",
        "run as that user",
    ]


def test_a_message_for_a_program_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.complain("word " * 40 + "\x1b[2J")
    assert capsys.readouterr().err == "starling: " + "word " * 40 + "\u241b[2J\n"


TITLES = ("NAME", "DIGEST", "STATE")
ROW = ("smollm2-135m-instruct", "b179c9523d0e", "loaded")


@pytest.mark.parametrize(
    ("columns", "shown"), [(80, "NAME DIGEST STATE"), (43, "NAME DIGEST STATE"), (42, "NAME STATE"), (29, "NAME STATE")]
)
def test_a_narrow_terminal_keeps_the_name(monkeypatch: pytest.MonkeyPatch, columns: int, shown: str) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    tables.print_table(TITLES, [ROW], leave=("DIGEST",))
    title, _, row = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
    assert title.split() == shown.split()
    assert row.split() == [ROW[TITLES.index(name)] for name in shown.split()]
    assert len(row) <= columns


def test_a_table_has_no_control_characters_and_folds_texts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another host says must not move the cursor of an operator's terminal."""
    hostile = "an error\x1b[2J\nof many words that takes more than a line"
    tables.print_table(("AGENT", "DETAILS"), [("one", hostile)], fold=("DETAILS",))
    assert capsys.readouterr().out.splitlines()[1] == f"one    {hostile}".replace("\x1b", "\u241b").replace("\n", " ")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    tables.print_table(("AGENT", "DETAILS"), [("one", hostile)], fold=("DETAILS",))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
    assert max(map(len, lines)) <= 30 and "\x1b[2J" not in screen.getvalue()
    assert " ".join(" ".join(line.split("  ")[-1] for line in lines[2:]).split()).endswith(
        "that takes more than a line"
    )


@pytest.mark.parametrize(("columns", "width"), [(200, 76), (80, 76), (60, 56), (30, 56)])
def test_the_figures_of_a_measurement_are_as_wide_as_the_terminal(columns: int, width: int) -> None:
    table = lines(measure(Run([], 0.0, 1.0)), False, columns)[:5]
    assert {len(line) for line in table} == {width}


def test_a_timeline_has_no_digits_that_mean_nothing() -> None:
    event = {"at_ms": 107.4, "stage": "worker", "pid": 7, "event": "prefill", "begin": 0, "ms": 55.743815000000005}
    found = {"id": "req-1", "outcome": "finished", "duration_ms": 391.7, "model": "m", "tenant": "t", "received": 0.0}
    found |= {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 4, "omitted_events": 0}
    shown = list(trace_lines({**found, "events": [event], "phases_ms": {"prefill": 75.8}}))
    assert shown[4].split() == ["107.4", "ms", "worker", "7", "prefill", "begin=0", "ms=55.744"]
