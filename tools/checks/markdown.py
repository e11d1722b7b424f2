"""The parts of Markdown that the checks read: pages, fenced blocks, headings and links."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^ {0,3}(```+|~~~+)\s*(.*)$")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: the line of its opening fence (1-based), its info string and its text."""

    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        """The first word of the info string, which names the language."""
        return self.info.split(" ")[0]


def pages(root: Path) -> list[Path]:
    """Every Markdown page that git tracks or would track; outside a checkout, every page."""
    program = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listing = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    if listing.returncode:
        return sorted(root.rglob("*.md"))
    return sorted(path for name in listing.stdout.splitlines() if (path := root / name).exists())


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    opening: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opening is None and fence:
            opening, body = (number, fence[1], fence[2].strip()), []
        elif opening is not None and fence and fence[1].startswith(opening[1]) and not fence[2]:
            yield Block(opening[0], opening[2], "\n".join(body) + "\n")
            opening = None
        elif opening is not None:
            body.append(line)


def lines_outside_blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of everything outside fenced blocks."""
    covered: set[int] = set()
    for block in blocks(text):
        covered.update(range(block.line, block.line + block.text.rstrip("\n").count("\n") + 3))
    for number, line in enumerate(text.splitlines(), 1):
        if number not in covered:
            yield number, line


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of everything outside fenced blocks, without inline code."""
    for number, line in lines_outside_blocks(text):
        yield number, re.sub(r"`[^`]*`", "", line)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for _, line in lines_outside_blocks(text):
        heading = HEADING.match(line)
        if heading:
            slug = re.sub(r"[^\w\- ]", "", heading[1].replace("`", "").lower()).replace(" ", "-")
            name, n = slug, 0
            while name in found:
                n += 1
                name = f"{slug}-{n}"
            found.add(name)
    return found
