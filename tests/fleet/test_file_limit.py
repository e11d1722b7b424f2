"""Processes of a fleet may open as many files as the hard limit allows: each stream needs two connections."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ROOT

SOFT = 256

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("command", ["orchestrator", "agent"])
def test_the_soft_limit_of_open_files_is_raised(tmp_path: Path, command: str) -> None:
    (tmp_path / "blobs").mkdir()
    environment = {**os.environ, "STARLING_HOME": str(tmp_path), "STARLING_FLEET__BLOBS": str(tmp_path / "blobs")}
    shell = f"ulimit -Sn {SOFT} && exec {sys.executable} -m starling {command} --port 0"
    with subprocess.Popen(
        ["bash", "-c", shell], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any("is ready at" in line for line in process.stdout)
            limits = Path(f"/proc/{process.pid}/limits").read_text()
            soft, hard = next(line for line in limits.splitlines() if "open files" in line).split()[3:5]
            assert soft == hard
            assert soft == "unlimited" or int(soft) > SOFT
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
