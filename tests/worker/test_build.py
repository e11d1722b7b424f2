"""Compiling entries in processes of their own: they end with their parent, and with each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import procfs
from stages.worker.kernels import build as build_module
from stages.worker.kernels import features
from stages.worker.kernels.build import PROBE, build, with_probe
from tests.e2e.conftest import copy_cache
from tests.worker.instruction_sets import available_isas

pytestmark = pytest.mark.slow

BUILD = "from stages.worker.kernels import build; build.build('f16', jobs=2)"
LONG_S = 500.0  # that only a failure reaches: processes import the compiler and compile, beside other tests
ISA = "portable" if features.isa() == "portable" else "vnni"  # of builds: on a CPU with AMX they would probe


def start(home: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "STARLING_HOME": str(home), "STARLING_ISA": ISA}
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
    assert "CompilerFailed: compiling kernel 'steps' failed (-9)" in words
    assert all(map(has_ended, pidfds))


def test_a_compiler_that_ends_before_it_is_told_what_to_compile_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may get no core for a while after it has started the process."""
    begin = build_module._Compiler.begin

    def begin_later(compiler: build_module._Compiler, entry: str) -> None:
        os.waitid(os.P_PID, compiler._process.pid, os.WEXITED | os.WNOWAIT)
        begin(compiler, entry)

    monkeypatch.setattr(build_module._Compiler, "begin", begin_later)
    monkeypatch.setattr(build_module, "COMPILER", {"STARLING_ISA": "abacus"})
    monkeypatch.delenv("STARLING_ISA", raising=False)
    monkeypatch.setattr(features, "cache_dir", lambda: tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)compiling kernel 'steps' failed \(1\).*'abacus'"):
        build("f16", jobs=1)


def test_a_compiler_that_cannot_be_started_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one: a program that is not there stands for a system that is short of memory or processes."""
    start, paths = build_module._Compiler.__init__, iter([sys.executable, str(tmp_path / "missing")])
    started = []

    def start_with_next(compiler: build_module._Compiler, kv_type: str) -> None:
        monkeypatch.setattr(sys, "executable", next(paths))
        start(compiler, kv_type)
        started.append(compiler._process)

    monkeypatch.setattr(build_module._Compiler, "__init__", start_with_next)
    monkeypatch.setattr(features, "cache_dir", lambda: tmp_path)
    words = r"compiling kernel '\w+' failed: the compiler cannot be started: .*No such file or directory: '.*/missing'"
    with pytest.raises(build_module.CompilerFailed, match=words) as caught:
        build("f16", jobs=2)
    assert caught.value.code is None
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_where_tiles_are_to_be_compared_the_products_come_first() -> None:
    assert with_probe(["steps", "draw", "matmul", "head"]) == ["matmul", "steps", "draw", "head"]
    assert with_probe(["draw"]) == [PROBE, "draw"]
    assert with_probe([]) == [PROBE]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The tests' own kernels of VNNI but for `head`, as the cache of the home `tmp_path`."""
    found = tmp_path / "cache" / features.cache_dir().name
    build("f16")
    copy_cache(features.cache_dir(), found)
    (found / "head-any.symbol").unlink()
    return found


def start_probing(home: Path, **variables: str) -> subprocess.Popen[str]:
    """Build on a CPU of which it is said that it has tiles to compare."""
    code = (
        "from stages.worker.kernels import amx_verdict, build;"
        "amx_verdict.needs_probe = lambda: True;"
        "show = lambda *found: print(*found, sep='|', flush=True);"
        "build.build('f16', 2, show, probe=True);"
        "print(repr(amx_verdict.amx_verdict().against))"
    )
    env = {**os.environ, "STARLING_HOME": str(home), "STARLING_ISA": ISA, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], env=env, text=True, **pipes)


def answers(process: subprocess.Popen[str]) -> tuple[list[list[str]], str, str]:
    """What it has shown, why it uses no tiles, and its warnings."""
    output, warnings = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, warnings
    *shown, against = output.splitlines()
    return [line.split("|") for line in shown], against, warnings


@pytest.mark.skipif("amx" in available_isas(), reason="its probe gives a verdict")
def test_a_build_runs_the_probe_beside_other_entries(tmp_path: Path, cache: Path) -> None:
    """Here the probe ends without a verdict: the CPU has no AMX."""
    shown, against, _ = answers(start_probing(tmp_path))
    assert {name for name, _, _ in shown} == {"", "head", PROBE}
    assert [numbers for _, *numbers in shown] == [["5", "7"], ["6", "7"], ["7", "7"]]
    assert (cache / "amx-failure.json").exists()
    assert "its probe ended with 1" in against


# A module that every Python process imports: the probe of a compiler's process prints a verdict, and no more.
SITE = """
import sys
if "stages.worker.kernels.compile_entries" in sys.orig_argv:
    from stages.worker.kernels import amx_verdict
    found = amx_verdict.Verdict({name: [1.3] * 4 for name in amx_verdict.ALL_FORMATS}, "")
    amx_verdict.PROBE[:] = ["-c", f"import json; print({amx_verdict.json.dumps(found._asdict())!r})"]
"""


def test_a_verdict_that_cannot_be_stored_is_that_of_the_build(tmp_path: Path, cache: Path) -> None:
    """A folder in the place of its file stands for a full disk."""
    (cache / "amx-speedups.part").mkdir()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    parent = start_probing(tmp_path, PYTHONPATH=f"{site}{os.pathsep}{os.getcwd()}")
    shown, against, warnings = answers(parent)
    assert shown[-1][1:] == ["7", "7"]
    assert against == "''"
    assert warnings == "AMX is probed at each start\n"
    assert not (cache / "amx-speedups.json").exists()


def test_a_probe_that_answers_something_else_leaves_no_verdict(tmp_path: Path, cache: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE + '    amx_verdict.Found.encode = lambda found: "nonsense"\n')
    (cache / "amx-speedups.part").mkdir()  # nothing is stored
    parent = start_probing(tmp_path, PYTHONPATH=f"{site}{os.pathsep}{os.getcwd()}")
    shown, against, _ = answers(parent)
    assert shown[-1][1:] == ["7", "7"]
    assert "its probe has left no verdict" in against


def test_a_build_needs_no_probe(tmp_path: Path, cache: Path) -> None:
    """The process that should run it is killed while it waits for the lock."""
    with open(cache / "amx.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        parent = start_probing(tmp_path)
        assert parent.stdout is not None
        shown = [parent.stdout.readline().rstrip("\n") for _ in range(2)]
        assert shown == ["|5|7", "head|6|7"]
        waiting: list[int] = []
        while not waiting:
            assert parent.poll() is None
            waiting = [pid for pid in procfs.children(parent.pid) if str(cache / "amx.lock") in open_files(pid)]
        (compiler,) = waiting
        os.kill(compiler, signal.SIGKILL)
        shown_last, against, _ = answers(parent)
    assert shown_last == [[PROBE, "7", "7"]]
    assert "no verdict" in against


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process are of."""
    with contextlib.suppress(FileNotFoundError):
        return [os.path.realpath(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return []
