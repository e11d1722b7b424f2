"""The tables of docs/models.md name every architecture and every class of Hugging Face that loads, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from stages.worker.checkpoint.architectures import ARCHITECTURES
from stages.worker.huggingface.families import FAMILIES

_ROOT = Path(__file__).parents[2]
_TEXT = (_ROOT / "docs" / "models.md").read_text()


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


def test_the_size_of_the_real_models_is_that_of_the_table() -> None:
    head = _TEXT[_TEXT.index("\n| model | file, MB |") + 1 :].split("\n\n", 1)[0].splitlines()
    total = sum(int(row.split("|")[2]) for row in head[2:])
    (target,) = [line for line in (_ROOT / "Makefile").read_text().splitlines() if line.startswith("real-models:")]
    for text in (target, _TEXT[_TEXT.index("`make real-models` fetches") :].partition("\n")[0]):
        found = re.search(r"(\d+) MB", text)
        assert found is not None
        assert int(found[1]) == round(total, -1)
