"""Which CPUs are refused and why; what the key of the kernel cache depends on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.worker.kernels.features import MINIMUM, VNNI_NEEDS, UnsupportedCpu, choose_isa

HASWELL = dict.fromkeys(MINIMUM, True)
SERVER = HASWELL | dict.fromkeys(VNNI_NEEDS, True)


def test_choice() -> None:
    assert choose_isa(HASWELL, "native") == "portable"
    assert choose_isa(SERVER, "native") == "vnni"
    assert choose_isa(SERVER, "portable") == "portable"
    assert choose_isa(SERVER, "vnni") == "vnni"


@pytest.mark.parametrize("missing", MINIMUM)
def test_cpus_below_the_minimum_are_refused(missing: str) -> None:
    with pytest.raises(UnsupportedCpu, match=f"lacks {missing}; the kernels need x86-64-v3"):
        choose_isa(HASWELL | {missing: False}, "native")


def test_wishes_are_checked() -> None:
    with pytest.raises(UnsupportedCpu, match="'sse', expected one of portable, vnni, native"):
        choose_isa(SERVER, "sse")
    with pytest.raises(UnsupportedCpu, match="lacks avx512vnni"):
        choose_isa(SERVER | {"avx512vnni": False}, "vnni")


def test_the_cache_has_a_directory_for_each_target(tmp_path: Path) -> None:
    code = (
        "from stages.worker.kernels import simd; from numba.core import config;"
        "print(simd.ISA, config.CACHE_DIR, config.CPU_NAME)"
    )
    directories = set()
    for isa in ("portable", "native"):
        environment = {**os.environ, "STARLING_ISA": isa, "STARLING_HOME": str(tmp_path)}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        chosen, directory, cpu = out.stdout.split()
        assert chosen == "portable" or isa == "native"
        assert Path(directory).parent == tmp_path / "cache"
        assert (cpu == "x86-64-v3") == (chosen == "portable")
        directories.add(directory)
    if chosen != "portable":
        assert len(directories) == 2


def test_a_restriction_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    """Jitted functions of another CPU must not pass for portable ones."""
    code = "import numba; numba.njit(lambda x: x); import stages.worker"
    environment = {**os.environ, "STARLING_ISA": "portable", "STARLING_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "import it first" in done.stderr


def test_old_caches_are_removed(tmp_path: Path) -> None:
    for days in range(8):
        old = tmp_path / "cache" / f"kernels-{days}"
        old.mkdir(parents=True)
        os.utime(old, (time.time() - 86400 * days, time.time() - 86400 * days))
    environment = {**os.environ, "STARLING_HOME": str(tmp_path)}
    code = "import stages.worker; print(stages.worker.settle.__module__)"
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert {"kernels-0", "kernels-1", "kernels-2"} <= left
    assert len(left) == 4
