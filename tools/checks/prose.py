"""Spelling and style of pages, docstrings and comments.

Three tools: `codespell` (spelling, all files), `proselint` (style, Markdown pages), and a short list of words that
usually hide a noun or an actor. Code in pages (fenced blocks, inline code) is not prose.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tools.checks import markdown

# Word -> what to write. They hide who acts; name the process, the client or the tenant.
AVOIDED = {
    "nobody": "name the noun: no client, no stage, no process",
    "somebody": "name the noun",
    "anybody": "name the noun",
    "whoever": "name the noun",
    "whosoever": "name the noun",
    "hears": "a process receives",
    "heard of": "a process receives",
    "is told": "a process receives",
    "are told": "a process receives",
    "set aside": "preempt",
    "lineup": "model versions",
    "companion": "draft sequence",
    "roster": "sequence table",
    "taken up again": "resumed",
}
AVOIDED_RE = re.compile(r"\b(" + "|".join(re.escape(word) for word in AVOIDED) + r")\b", re.IGNORECASE)
# A process does none of these.
_PROCESSES = "agent|engine|gateway|kv|orchestrator|process|rank|scheduler|stage|supervisor|tokenizer|worker"
_MINDS = r"tells?|hears?|knows?|looks? (?:at|for|whether)"
MINDS_RE = re.compile(
    rf"\b(?:{_PROCESSES})(?:s|es)? (?:(?:does|do|can)(?: not|not) )?(?:{_MINDS})\b",
    re.IGNORECASE,
)
# Checks of proselint that do not apply: pages are ASCII with straight quotes, and ranges of figures are not dates.
NOT_USED = ("typography.", "dates_times.")
FOLDERS = ("shm", "pipeline", "stages", "starling", "tools", "tests")
ITSELF = ("tools/checks/prose.py", "tests/tools/test_checks.py")


def problems(root: Path) -> Iterator[str]:
    """One line per finding of the three tools."""
    yield from _codespell(root)
    yield from _proselint(root)
    for page in markdown.pages(root):
        yield from _avoided(markdown.prose_lines(page.read_text()), str(page.relative_to(root)))
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            where = str(path.relative_to(root))
            if where not in ITSELF:
                yield from _avoided(texts(path.read_text()), where)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of the comments and string literals of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.type == tokenize.STRING:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def _avoided(lines: Iterator[tuple[int, str]], where: str) -> Iterator[str]:
    for number, line in lines:
        for word in AVOIDED_RE.findall(line):
            yield f"{where}:{number}: `{word}`: {AVOIDED[word.lower()]}"
        for phrase in MINDS_RE.findall(line):
            yield f"{where}:{number}: `{phrase}`: a process sends, receives, stores and checks"


def _codespell(root: Path) -> Iterator[str]:
    found = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--quiet-level=2"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    yield from (line.removeprefix("./") for line in (found.stdout + found.stderr).splitlines() if line.strip())


def _proselint(root: Path) -> Iterator[str]:
    """Pages without their code blocks, checked as one run."""
    with tempfile.TemporaryDirectory() as folder:
        names = {}
        for page in markdown.pages(root):
            copy = Path(folder) / str(page.relative_to(root)).replace("/", "--")
            kept = dict(markdown.prose_lines(page.read_text()))
            count = len(page.read_text().splitlines())
            copy.write_text("\n".join(kept.get(number, "") for number in range(1, count + 1)) + "\n")
            names[str(copy)] = page.relative_to(root)
        program = [sys.executable, "-m", "proselint", "--output-format", "full", "check", *names]
        found = subprocess.run(program, capture_output=True, text=True, check=False)
    if found.stderr.strip():
        yield f"proselint failed: {found.stderr.strip()[-300:]}"
    for line in found.stdout.splitlines():
        copied, _, rest = line.partition(":")
        if not any(f" {check}" in rest for check in NOT_USED):
            yield f"{names.get(copied, copied)}:{rest}"
