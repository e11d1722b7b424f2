"""Each check finds what it is for, and accepts what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.checks import commands, cycles, diagrams, length, links, markdown, prose

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, name: str, text: str) -> None:
    """One file below `root`, with its folders."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cycles_of_every_kind_are_found(tmp_path: Path) -> None:
    write(tmp_path, "pipeline/__init__.py", "")
    write(tmp_path, "pipeline/a.py", "from pipeline import b\n")
    write(tmp_path, "pipeline/b.py", "def late():\n    from .c import name\n")
    write(tmp_path, "pipeline/c.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pipeline.a\n")
    write(tmp_path, "pipeline/d.py", "from pipeline.a import x\n")
    (found,) = cycles.problems(tmp_path)
    assert found.startswith("pipeline.a, pipeline.b, pipeline.c: ")


def test_a_chain_of_imports_is_no_cycle(tmp_path: Path) -> None:
    write(tmp_path, "shm/a.py", "")
    write(tmp_path, "pipeline/b.py", "from shm.a import x\nimport json\n")
    write(tmp_path, "stages/c.py", "from pipeline import b\nfrom shm import a\n")
    assert list(cycles.problems(tmp_path)) == []
    assert cycles.graph(tmp_path)["stages.c"] == {"pipeline.b", "shm.a"}


def test_a_long_file_needs_a_reason(tmp_path: Path) -> None:
    body = "x = 1\n" * length.LIMIT
    write(tmp_path, "shm/long.py", '"""One idea."""\n' + body)
    write(tmp_path, "shm/explained.py", '"""One idea.\n\nLength: one generated table.\n"""\n' + body)
    write(tmp_path, "shm/short.py", body)
    (found,) = length.problems(tmp_path)
    assert found.startswith("shm/long.py: 501 lines")


def test_links_lead_somewhere(tmp_path: Path) -> None:
    write(tmp_path, "docs/a.md", "# A page\n\n## A `part` of it\n\n```sh run\n[no](link.md)\n```\n")
    write(tmp_path, "stages/kv/stage.py", "")
    good = "[a](docs/a.md) [b](docs/a.md#a-part-of-it) [c](https://example.org/x) [d](#top) `stages/kv/stage.py`\n"
    write(tmp_path, "good.md", "# Top\n\n" + good)
    assert list(links.problems(tmp_path)) == []
    write(tmp_path, "bad.md", "[a](docs/b.md)\n[b](docs/a.md#another)\n`stages/kv/gone.py`\n")
    assert [line.split(": ", 1)[0] for line in links.problems(tmp_path)] == ["bad.md:1", "bad.md:2", "bad.md:3"]


@pytest.mark.parametrize(
    ("info", "text", "is_right"),
    [
        ("sh run", "true\n", True),
        ("sh serve", "make serve\n", True),
        ("sh run promtool", "promtool\n", True),
        ("sh dry-run", "make test\n", True),
        ("sh machine", "sudo systemctl start x\n", True),
        ("sh deploy podman", "podman build .\n", True),
        ("sh serve podman", "podman run x\n", False),
        ("sh syntax", "true\n", False),
        ("sh illustrative", "curl <URL> (\n", True),
        ("json", "{}\n", True),
        ("python run", "1\n", True),
        ("python", "1\n", False),
        ("sh", "true\n", False),
        ("bash run", "true\n", False),
        ("sh sometimes", "true\n", False),
        ("sh run", "if true\n", False),
        ("", "output\n", False),
    ],
)
def test_shell_blocks_are_tagged_and_parse(tmp_path: Path, info: str, text: str, is_right: bool) -> None:
    write(tmp_path, "a.md", f"Text.\n\n```{info}\n{text}```\n")
    assert (list(commands.problems(tmp_path)) == []) is is_right


@pytest.mark.parametrize(
    ("source", "is_right"),
    [
        ("flowchart LR\n    a[one] --> b\n", True),
        ("stateDiagram-v2\n    [*] --> free\n    free --> leased: allocate\n", True),
        ("sequenceDiagram\n    A->>B: call\n    loop each step\n    B-->>A: answer\n    end\n", True),
        ("flowchart LR\n    a -->[ b\n", False),
        ("sequenceDiagram\n    loop never closed\n    A->>B: call\n", False),
        ("no diagram at all\n", False),
    ],
)
def test_diagrams_parse(tmp_path: Path, source: str, is_right: bool) -> None:
    write(tmp_path, "a.md", f"```mermaid\n{source}```\n")
    assert (list(diagrams.problems(tmp_path)) == []) is is_right


def test_spelling_and_style_are_checked(tmp_path: Path) -> None:
    write(tmp_path, "good.md", "# Title\n\nThe gateway sends the frame.\n\n```sh run\necho recieve\n```\n")
    write(tmp_path, "stages/a.py", "# The worker writes the page.\nx = 'sent'\n")
    found = [line for line in prose.problems(tmp_path) if "good.md:6" not in line]  # codespell reads blocks as well
    assert found == []
    bad = ("This is recieve word.", "A very unique page.", "Nobody is told.", "The gateway does not know it.")
    write(tmp_path, "bad.md", "\n\n".join(bad) + "\n")
    write(tmp_path, "stages/b.py", '"""Tells\nwhoever asks."""\nnobody = 1\n')
    found = list(prose.problems(tmp_path))
    pages = ("bad.md:1: recieve", "bad.md:3", "bad.md:5: `Nobody`", "bad.md:7: `gateway does not know`")
    for expected in (*pages, "stages/b.py:2: `whoever`"):
        assert any(line.startswith(expected) for line in found), (expected, found)
    assert not any(line.startswith("stages/b.py:3") for line in found)


def test_blocks_and_prose_do_not_overlap() -> None:
    text = "a\n```sh run\nb\n```\nc `d`\n~~~text\ne\n~~~\nf\n"
    assert [block.text for block in markdown.blocks(text)] == ["b\n", "e\n"]
    assert list(markdown.prose_lines(text)) == [(1, "a"), (5, "c "), (9, "f")]
