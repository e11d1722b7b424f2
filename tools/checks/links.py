"""Every relative link in a Markdown page leads to a file of the repository, and its anchor to a heading of it.

Links to other hosts are not followed: the check needs no network. Inline code that names a file of the product
(`stages/kv/stage.py`) is checked as well, so that a renamed module leaves no stale name in the documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.checks import markdown

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
FILE = re.compile(r"`((?:shm|pipeline|stages|starling|tools|tests|configs|docs|locks)/[\w./-]*\w\.[a-z0-9]+)`")


def problems(root: Path) -> Iterator[str]:
    """One line per link or file name that leads nowhere."""
    for page in markdown.pages(root):
        where = page.relative_to(root)
        text = page.read_text()
        for number, line in markdown.lines_outside_blocks(text):
            for target in LINK.findall(line):
                if not re.match(r"[a-z]+:", target):
                    yield from _link(page, target, f"{where}:{number}")
            for name in FILE.findall(line):
                if not (root / name).exists():
                    yield f"{where}:{number}: `{name}` is not a file of this repository"


def _link(page: Path, target: str, where: str) -> Iterator[str]:
    name, _, anchor = target.partition("#")
    path = (page.parent / name) if name else page
    if not path.exists():
        yield f"{where}: {target} leads to no file"
    elif anchor and path.suffix == ".md" and anchor not in markdown.anchors(path.read_text()):
        yield f"{where}: {target} names no heading of {path.name}"
