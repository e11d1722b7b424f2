"""No Python file over 500 lines, unless its docstring has a line "Length: ..." with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LIMIT = 500  # lines; about 300 is where a file usually begins to hold a second idea
FOLDERS = ("shm", "pipeline", "stages", "starling", "tools", "tests")


def problems(root: Path) -> Iterator[str]:
    """One line per file that is too long and gives no reason."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text()
            lines = source.count("\n")
            if lines <= LIMIT:
                continue
            docstring = ast.get_docstring(ast.parse(source)) or ""
            if not any(line.startswith("Length: ") for line in docstring.splitlines()):
                where = path.relative_to(root)
                remedy = "split it, or give the reason in a docstring line `Length: ...`"
                yield f"{where}: {lines} lines, over {LIMIT}: {remedy}"
