"""Kernels are compiled while the model is prepared: the build ends with its block, and its failure is reported."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pipeline import procfs
from stages.worker.kernels import amx_verdict, build, features, stored_code
from stages.worker.kernels.background_build import BackgroundBuild

pytestmark = pytest.mark.slow

LONG_S = 60.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(features, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(amx_verdict, "needs_probe", lambda: False)  # on a CPU with AMX one would be
    return tmp_path


def test_compilers_run_beside_the_caller_and_end_with_the_block(cache: Path) -> None:
    before = set(procfs.children(os.getpid()))
    with BackgroundBuild("f16", jobs=2):
        while not (started := set(procfs.children(os.getpid())) - before):
            pass  # this thread is free
    assert not started & set(procfs.children(os.getpid()))
    assert not [thread for thread in threading.enumerate() if thread.name == "compile kernels"]


def test_a_failed_compiler_is_reported_by_wait(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILER", {"STARLING_ISA": "abacus"})
    monkeypatch.delenv("STARLING_ISA", raising=False)
    seen = []
    failed = pytest.raises(RuntimeError, match=r"(?s)compiling kernel 'steps' failed \(1\).*'abacus'")
    with failed, BackgroundBuild("f16", jobs=1) as kernels:
        kernels.wait(lambda phase, done, of: seen.append((phase, done, of)))
    assert set(seen) <= {("compile kernels", 0, len(stored_code.ENTRIES))}


def test_kernels_in_the_cache_start_nothing(cache: Path) -> None:
    for name in stored_code.ENTRIES:
        stored_code.symbol_path(name, "f16").touch()
    before = procfs.children(os.getpid())
    with BackgroundBuild("f16") as kernels:
        kernels.wait(lambda phase, done, of: pytest.fail("there is nothing to wait for"))
        assert procfs.children(os.getpid()) == before
