"""The code of the previous release, v0.1.0: from git, in processes of its own with the packages of this environment.

tree = unpack(folder)                          # skips the test where git lacks the commit
found = run(tree, SCRIPT, "write", home)       # what the script printed last, as JSON
with PreviousServer(tree, home, config):       # its `starling up`, which compiles its kernels
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import ROOT
from tests.e2e.up_server import Up

V0_1_0 = "fee3ea5"
LIMIT_S = 240
START_S = 900  # the kernels of the previous release are compiled, perhaps beside other work


def unpack(folder: Path) -> Path:
    """The files of the previous release, below `folder`."""
    if shutil.which("git") is None:
        pytest.skip("git, which has the files of v0.1.0, is not installed")
    packed = subprocess.run(["git", "-C", ROOT, "archive", V0_1_0], capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"git does not have the commit of v0.1.0 here: {packed.stderr.decode().strip()[:200]}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environment(tree: Path, home: Path) -> dict[str, str]:
    """Variables with which Python finds the code of the previous release, and that code its state."""
    return {**os.environ, "PYTHONPATH": str(tree), "STARLING_HOME": str(home)}


def run(tree: Path, script: str, action: str, home: Path, *arguments: Path) -> dict[str, Any]:
    """Run a script beside the code of the previous release. Returns the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-c", script, action, home, *arguments],
        cwd=tree,
        env=environment(tree, home),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


class PreviousServer(Up):
    """`starling up` of the previous release."""

    def __init__(self, tree: Path, home: Path, config: Mapping[str, Any]) -> None:
        super().__init__(home, config)
        programs = tree / "programs"
        programs.mkdir(exist_ok=True)
        # Its Procfile calls `starling`.
        program = programs / "starling"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipeline.cli "$@"\n')
        program.chmod(0o755)
        self.command = (str(program), "up")
        self.directory = tree
        self.environment |= {"PYTHONPATH": str(tree), "PATH": f"{programs}:{self.environment['PATH']}"}

    def wait_ready(self) -> PreviousServer:
        self.wait_for(rf"Starling is ready at http://127\.0\.0\.1:{self.port} ", START_S)
        return self
