"""The file map of ARCHITECTURE.md, from the first sentence of each module's docstring.

python -m tools.file_map            rewrite the section
python -m tools.file_map --check    exit 1 when it is not what the sources say
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("shm", "pipeline", "stages", "tools")
HEADING = "## File map"


def first_sentence(path: Path) -> str:
    """Of the module's docstring, on one line; "" without one."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9`)])\.(?:\s|$)", text)[0].rstrip(".")


def file_map(root: Path) -> str:
    """The section: a list for each folder, a line for each file that says what it is."""
    lines = [HEADING, "", "Written by `make map` from the modules' docstrings."]
    for folder in FOLDERS:
        section = ""
        for path in sorted((root / folder).rglob("*.py"), key=lambda path: (path.parent, path.name)):
            sentence = first_sentence(path)
            if not sentence:
                continue
            package = path.parent.relative_to(root).as_posix()
            if package != section:
                section = package
                lines += ["", f"`{package}/`", ""]
            lines.append(f"- `{path.name}`: {sentence}")
    return "\n".join(lines) + "\n"


def replaced(document: str, section: str) -> str:
    """`document` with its file map, which ends at the next heading, exchanged or appended."""
    begin = document.find(HEADING)
    if begin < 0:
        return document.rstrip() + "\n\n" + section
    end = document.find("\n## ", begin + 1)
    return document[:begin] + section + (document[end:] if end >= 0 else "")


def main(arguments: list[str]) -> int:
    path = ROOT / "ARCHITECTURE.md"
    before = path.read_text()
    after = replaced(before, file_map(ROOT))
    if "--check" not in arguments:
        path.write_text(after)
    elif before != after:
        print("ARCHITECTURE.md: the file map is not what the sources say; run make map")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
