"""The file map is one line for each file that says what it is, and replaces only itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.file_map import HEADING, file_map, first_sentence, replaced


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ('"""One idea. And more."""', "One idea"),
        ('"""A line\nthat goes on: with `x.py`.\n\nA paragraph."""', "A line that goes on: with `x.py`"),
        ('"""POST /v1/a: b."""', "POST /v1/a: b"),
        ("import os", ""),
    ],
)
def test_first_sentence(tmp_path: Path, source: str, sentence: str) -> None:
    path = tmp_path / "m.py"
    path.write_text(source)
    assert first_sentence(path) == sentence


def test_files_are_listed_by_folder(tmp_path: Path) -> None:
    for name in ("shm/b.py", "shm/a.py", "stages/kv/c.py", "stages/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "init" in name else f'"""What {name} is."""')
    lines = [line for line in file_map(tmp_path).splitlines() if line.startswith(("-", "`"))]
    assert lines == [
        "`shm/`",
        "- `a.py`: What shm/a.py is",
        "- `b.py`: What shm/b.py is",
        "`stages/kv/`",
        "- `c.py`: What stages/kv/c.py is",
    ]


def test_only_the_section_is_replaced() -> None:
    old = f"# A\n\ntext\n\n{HEADING}\n\nold\n\n## Glossary\n\nwords\n"
    new = replaced(old, f"{HEADING}\n\nnew\n")
    assert new == f"# A\n\ntext\n\n{HEADING}\n\nnew\n\n## Glossary\n\nwords\n"
    assert replaced(new, f"{HEADING}\n\nnew\n") == new
    assert replaced("# A\n", f"{HEADING}\n\nnew\n") == f"# A\n\n{HEADING}\n\nnew\n"
