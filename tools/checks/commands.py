"""Every shell command in the documentation says how it is checked.

The info string of a fenced shell block carries one tag:

    ```sh run           a test runs the block (tests/docs/test_commands.py)
    ```sh run PROGRAM   the same, where PROGRAM is installed
    ```sh serve         a test starts a server with it, and the blocks after it run against that server
    ```sh dry-run       a test runs it with `make --dry-run`: what it makes takes minutes, or is this test itself
    ```sh machine       a test runs it on a copy of /etc and /var/lib, with systemctl working on files alone
    ```sh deploy        `make test-deploy` runs it: needs a package index, a container engine, minutes
    ```sh kubernetes    tests/fleet/test_kubernetes.py runs it with kubectl and helm against a part of the API
    ```sh ray           tests/fleet/test_ray.py runs it in a Ray cluster on one machine, with its addresses
    ```sh illustrative  not a command to type as it stands: an excerpt, or a template with names to fill in

Python blocks carry `run` or `illustrative` in the same way. A block without a tag, an unknown tag, and a block that
`bash -n` refuses are violations.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.checks import markdown

LANGUAGES = ("sh", "bash", "shell", "console")
RUN_BY_TESTS = ("run", "serve", "dry-run", "machine")
TAGS = (*RUN_BY_TESTS, "deploy", "kubernetes", "ray", "illustrative")
NEEDS_PROGRAMS = ("run", "deploy")


def problems(root: Path) -> Iterator[str]:
    """One line per untagged, wrongly tagged or unparsable shell block."""
    for page in markdown.pages(root):
        for block in markdown.blocks(page.read_text()):
            where = f"{page.relative_to(root)}:{block.line}"
            if not block.info:
                yield f"{where}: a fenced block without a language; use `text` for output"
            elif block.language in LANGUAGES:
                yield from _shell(block, where)
            elif block.language == "python" and block.info.split()[1:] not in (["run"], ["illustrative"]):
                yield f"{where}: `{block.info}`: a Python block is `python run` or `python illustrative`"


def _shell(block: markdown.Block, where: str) -> Iterator[str]:
    tags = block.info.split()[1:]
    programs = tags[1:]
    if block.language != "sh" or not tags or tags[0] not in TAGS or (programs and tags[0] not in NEEDS_PROGRAMS):
        yield f"{where}: `{block.info}`: a shell block is one of {', '.join(f'`sh {tag}`' for tag in TAGS)}"
    elif tags[0] != "illustrative":
        parsed = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        if parsed.returncode:
            yield f"{where}: bash does not parse it: {parsed.stderr.strip()}"
