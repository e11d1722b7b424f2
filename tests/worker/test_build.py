"""Compiling entries in processes of their own: they end with their parent, and with each other."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import procfs

pytestmark = pytest.mark.slow

BUILD = "from stages.worker.kernels import build; build.build('f16', jobs=2)"
LONG_S = 60.0


def start(home: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "STARLING_HOME": str(home)}
    return subprocess.Popen([sys.executable, "-c", BUILD], env=env, stderr=subprocess.PIPE, text=True)


def compilers(parent: subprocess.Popen[str]) -> list[int]:
    """Pidfds of both, once they run."""
    while len(children := procfs.children(parent.pid)) < 2:
        assert parent.poll() is None, parent.stderr and parent.stderr.read()
    return [os.pidfd_open(pid) for pid in children]


def has_ended(pidfd: int) -> bool:
    ended = bool(select.select([pidfd], [], [], LONG_S)[0])
    os.close(pidfd)
    return ended


def test_compilers_end_with_their_parent(tmp_path: Path) -> None:
    parent = start(tmp_path)
    pidfds = compilers(parent)
    parent.kill()
    parent.communicate()
    assert all(map(has_ended, pidfds))


def test_a_compiler_that_dies_ends_the_others_and_raises(tmp_path: Path) -> None:
    parent = start(tmp_path)
    pidfds = compilers(parent)
    signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
    words = parent.communicate(timeout=LONG_S)[1]
    assert parent.returncode == 1
    assert "RuntimeError: compiling kernel 'steps' failed (-9)" in words
    assert all(map(has_ended, pidfds))
