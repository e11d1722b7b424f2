"""The tables of docs/models.md name every architecture and every class of Hugging Face that loads, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from stages.worker.checkpoint.architectures import ARCHITECTURES
from stages.worker.huggingface.families import FAMILIES

_TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def _first_cells(heading: str) -> list[str]:
    """The first cells of the table whose head begins so."""
    rows = _TEXT[_TEXT.index(f"\n| {heading} |") + 1 :].split("\n\n", 1)[0].splitlines()
    return [row.split("|")[1] for row in rows[2:]]


def _names(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_architecture_has_a_row() -> None:
    assert _names(_first_cells("architecture")) == set(ARCHITECTURES)


def test_every_class_has_a_row() -> None:
    assert _names(_first_cells("class in `config.json`")) == set(FAMILIES)


def test_the_architectures_of_the_list_are_those_of_the_table() -> None:
    (row,) = [line for line in _TEXT.splitlines() if line.startswith("| architectures |")]
    assert _names(row.split("|")[2:]) == set(ARCHITECTURES)


def test_the_architectures_that_take_a_window_are_named() -> None:
    found = re.search(r"other architectures than (.*?) are refused if they have a\s+sliding window", _TEXT, re.S)
    assert found is not None
    assert _names([found[1]]) == {name for name, row in ARCHITECTURES.items() if row.window_period is not None}
