"""The code of the previous release, v0.1.0: from git, in processes of its own with the packages of this environment.

tree = unpack(folder)                          # skips the test where git lacks the commit
found = run(tree, SCRIPT, "write", home)       # what the script printed last, as JSON
with PreviousServer(tree, home, config):       # its `starling up`, which compiles its kernels
"""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
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
        # Its stages call the `starling` beside the interpreter: an environment of its own, with the packages here.
        programs = home / "previous" / "bin"
        if not programs.exists():
            venv.create(programs.parent, symlinks=True)
            [site] = programs.parent.glob("lib/*/site-packages")
            # A path alone: the .pth files there, and so the editable installation, are not read.
            (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
            program = programs / "starling"
            program.write_text(f'#!/bin/sh\nexec {programs}/python -m pipeline.cli "$@"\n')
            program.chmod(0o755)
        self.command = (str(programs / "starling"), "up")
        self.directory = tree
        self.environment |= {"PYTHONPATH": str(tree), "PATH": f"{programs}:{self.environment['PATH']}"}

    def wait_ready(self) -> PreviousServer:
        self.wait_for(rf"Starling is ready at http://127\.0\.0\.1:{self.port} ", START_S)
        return self

    def connect(self, timeout_s: float = START_S) -> http.client.HTTPConnection:
        """Its stages take each other for dead on a machine that has too much to do: an answer may take minutes."""
        return super().connect(timeout_s)
