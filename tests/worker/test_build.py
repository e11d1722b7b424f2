"""Compiling entries in processes of their own: they end with their parent, and with each other."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import procfs
from stages.worker.kernels import features
from stages.worker.kernels.build import PROBE, build, with_probe
from tests.worker.instruction_sets import available_isas

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


def test_where_tiles_are_to_be_compared_the_products_come_first() -> None:
    assert with_probe(["steps", "draw", "matmul", "head"]) == ["matmul", "steps", "draw", "head"]
    assert with_probe(["draw"]) == [PROBE, "draw"]
    assert with_probe([]) == [PROBE]


def test_a_build_compares_tiles_with_the_products(tmp_path: Path) -> None:
    """On a CPU without AMX of which another one is said: the probe runs, and ends without a verdict."""
    build("f16")
    shutil.copytree(features.cache_dir(), tmp_path / "cache" / features.cache_dir().name)
    (tmp_path / "cache" / features.cache_dir().name / "head-any.symbol").unlink()
    code = (
        "from stages.worker.kernels import amx_verdict, build;"
        "amx_verdict.needs_probe = lambda: True;"
        "build.build('f16', 2, lambda name, done, of: print(name, done, of))"
    )
    env = {**os.environ, "STARLING_HOME": str(tmp_path), "STARLING_ISA": "vnni"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    lines = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert {name for name, _, _ in lines} == {"head", PROBE}
    assert [numbers for _, *numbers in lines] == [["6", "7"], ["7", "7"]]
    (record,) = tmp_path.glob("cache/*/amx-*.json")
    assert record.name == ("amx-failure.json" if "amx" not in available_isas() else "amx-speedups.json")
