"""Which CPUs are refused and why, and what the key of the kernel cache depends on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.worker.kernels import features
from stages.worker.kernels.features import AMX_NEEDS, MINIMUM, VNNI_NEEDS, UnsupportedCpu, choose_isa

HASWELL = dict.fromkeys(MINIMUM, True)
SERVER = HASWELL | dict.fromkeys(VNNI_NEEDS, True)
NEWER = SERVER | dict.fromkeys(AMX_NEEDS, True)


def test_choice() -> None:
    assert choose_isa(HASWELL, "native") == "portable"
    assert choose_isa(SERVER, "native") == "vnni"
    assert choose_isa(SERVER, "portable") == "portable"
    assert choose_isa(SERVER, "vnni") == "vnni"
    assert choose_isa(NEWER, "native") == "amx"
    assert choose_isa(NEWER, "vnni") == "vnni"
    assert choose_isa(NEWER | {"avx512vnni": False}, "native") == "portable"
    assert choose_isa(SERVER, "tiles") == "tiles"


def test_amx_that_is_not_permitted_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise UnsupportedCpu("the system does not permit AMX tiles")

    monkeypatch.setattr(features.llvm, "get_host_cpu_features", lambda: NEWER)
    monkeypatch.setattr(features, "permit_amx", refused)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setenv("STARLING_ISA", "native")
    assert features.isa.__wrapped__() == "vnni"
    monkeypatch.setenv("STARLING_ISA", "amx")
    with pytest.raises(UnsupportedCpu, match="does not permit"):
        features.isa.__wrapped__()


class Host(dict[str, bool]):
    """CPU features as llvmlite returns them."""

    def flatten(self) -> str:
        return ",".join(f"+{name}" for name in self)


def emulate_amx(monkeypatch: pytest.MonkeyPatch, home: Path, probe: str) -> None:
    """Report a CPU with AMX that Linux permits; its probe is a Python process that runs the code `probe`."""
    monkeypatch.setattr(features.llvm, "get_host_cpu_features", lambda: Host(NEWER))
    monkeypatch.setattr(features, "permit_amx", lambda: None)
    monkeypatch.setattr(features, "PROBE", ["-c", probe])
    monkeypatch.setenv("STARLING_HOME", str(home))
    monkeypatch.setenv("STARLING_ISA", "native")


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("raise SystemExit(0)", ""),
        ("print('other bytes'); raise SystemExit(1)", "ended with 1: other bytes"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended with -4"),
    ],
)
def test_amx_is_probed_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, verdict: str
) -> None:
    """A CPU may report tiles that it cannot run: an instruction set is chosen even when the probe is killed."""

    emulate_amx(monkeypatch, tmp_path, f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); {code}")
    for _ in range(2):
        assert features.isa.__wrapped__() == ("vnni" if verdict else "amx")
        assert verdict in features.amx_verdict()
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize("missing", MINIMUM)
def test_cpus_below_the_minimum_are_refused(missing: str) -> None:
    with pytest.raises(UnsupportedCpu, match=f"lacks {missing}; the kernels need x86-64-v3"):
        choose_isa(HASWELL | {missing: False}, "native")


def test_isa_restrictions_are_checked() -> None:
    with pytest.raises(UnsupportedCpu, match="'sse', expected one of portable, vnni, amx, native, tiles"):
        choose_isa(SERVER, "sse")
    with pytest.raises(UnsupportedCpu, match="lacks avx512vnni"):
        choose_isa(SERVER | {"avx512vnni": False}, "vnni")
    with pytest.raises(UnsupportedCpu, match="lacks amx-tile, amx-int8"):
        choose_isa(SERVER, "amx")


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
    """Functions that were jitted for another CPU must not be used as portable ones."""
    code = "import numba; numba.njit(lambda x: x); import stages.worker"
    environment = {**os.environ, "STARLING_ISA": "portable", "STARLING_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "import it first" in done.stderr


def make_old_caches(home: Path) -> None:
    """Eight caches of other sources; `kernels-N` was last used N days ago."""
    for days in range(8):
        old = home / "cache" / f"kernels-{days}"
        old.mkdir(parents=True)
        os.utime(old, (time.time() - 86400 * days, time.time() - 86400 * days))


def test_old_caches_are_removed(tmp_path: Path) -> None:
    """With `portable`, which uses one cache on every CPU: a CPU with AMX has another one for the probe."""
    make_old_caches(tmp_path)
    environment = {**os.environ, "STARLING_HOME": str(tmp_path), "STARLING_ISA": "portable"}
    code = "import stages.worker; print(stages.worker.settle.__module__)"
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert {"kernels-0", "kernels-1", "kernels-2"} <= left
    assert len(left) == 4


def test_the_cache_of_a_failed_amx_probe_counts_as_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU whose AMX fails the probe two caches are in use: the probe's and that of VNNI."""
    make_old_caches(tmp_path)
    emulate_amx(monkeypatch, tmp_path, "raise SystemExit(1)")
    assert features.isa.__wrapped__() == "vnni"
    used = {features._cache_dir(isa) for isa in ("amx", "vnni")}
    features._cache_dir("vnni").mkdir()
    features._prune(tmp_path / "cache")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        "kernels-0",
        "kernels-1",
        *(path.name for path in used),
    }
