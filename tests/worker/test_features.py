"""Which CPUs are refused and why, and what the key of the kernel cache depends on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.runtime import cpu
from stages.worker.kernels import features
from stages.worker.kernels.features import AMX_NEEDS, AVX_VNNI_NEEDS, MINIMUM, VNNI_NEEDS, UnsupportedCpu, choose_isa

HASWELL = dict.fromkeys(MINIMUM, True)
ALDER_LAKE = HASWELL | dict.fromkeys(AVX_VNNI_NEEDS, True)
SERVER = HASWELL | dict.fromkeys(VNNI_NEEDS, True)
NEWER = SERVER | dict.fromkeys(AMX_NEEDS, True)


def test_choice() -> None:
    assert choose_isa(HASWELL, "native") == "portable"
    assert choose_isa(ALDER_LAKE, "native") == "avx-vnni"
    assert choose_isa(ALDER_LAKE, "portable") == "portable"
    assert choose_isa(HASWELL, "dots") == "dots"
    assert choose_isa(SERVER, "native") == "vnni"
    assert choose_isa(SERVER | ALDER_LAKE, "native") == "vnni"
    assert choose_isa(SERVER, "portable") == "portable"
    assert choose_isa(SERVER, "vnni") == "vnni"
    assert choose_isa(NEWER, "native") == "amx"
    assert choose_isa(NEWER, "vnni") == "vnni"
    assert choose_isa(NEWER | {"avx512vnni": False}, "native") == "portable"
    assert choose_isa(SERVER, "tiles") == "tiles"


def test_features_are_read_by_the_names_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "fields", lambda: {"flags": "avx2 fma f16c bmi2 avx_vnni"})
    assert features.host_features() == ALDER_LAKE


def test_amx_that_is_not_permitted_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise UnsupportedCpu("the system does not permit AMX tiles")

    monkeypatch.setattr(features, "host_features", lambda: NEWER)
    monkeypatch.setattr(features, "permit_amx", refused)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setenv("STARLING_ISA", "native")
    assert features.isa.__wrapped__() == "vnni"
    monkeypatch.setenv("STARLING_ISA", "amx")
    with pytest.raises(UnsupportedCpu, match="does not permit"):
        features.isa.__wrapped__()


def test_another_installation_uses_the_same_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And other sources use another one."""
    sources = Path(features.__file__).parents[3]
    names = ("stages/worker/kernels", "stages/worker/activations_arena.py", "pipeline/native", "shm")
    for name in names:
        copy = shutil.copytree if (sources / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(sources / name, tmp_path / name)
    here = features.cache_key.__wrapped__("portable")
    monkeypatch.setattr(features, "__file__", str(tmp_path / "stages/worker/kernels/features.py"))
    assert features.cache_key.__wrapped__("portable") == here
    for name in ("barrier", "sampler_steps"):
        before = features.cache_key.__wrapped__("portable")
        (tmp_path / f"shm/{name}.py").write_text("changed")
        assert features.cache_key.__wrapped__("portable") != before


def test_half_floats_are_converted_alike_on_every_cpu() -> None:
    assert features.without_unused("+avx512f,+avx512fp16,-amx-fp16") == "+avx512f,-avx512fp16,-amx-fp16"
    assert "+avx512fp16" not in features.target("native")[1]


@pytest.mark.parametrize("missing", MINIMUM)
def test_cpus_below_the_minimum_are_refused(missing: str) -> None:
    with pytest.raises(UnsupportedCpu, match=f"lacks {missing}; the kernels need x86-64-v3"):
        choose_isa(HASWELL | {missing: False}, "native")


def test_isa_restrictions_are_checked() -> None:
    with pytest.raises(UnsupportedCpu, match="'sse', expected one of portable, avx-vnni, vnni, amx, native, tiles"):
        choose_isa(SERVER, "sse")
    with pytest.raises(UnsupportedCpu, match="lacks avxvnni"):
        choose_isa(HASWELL, "avx-vnni")
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
        chosen, directory, target = out.stdout.split()
        assert chosen == "portable" or isa == "native"
        assert Path(directory).parent == tmp_path / "cache"
        assert (target == "x86-64-v3") == (chosen in ("portable", "avx-vnni"))
        directories.add(directory)
    if chosen != "portable":
        assert len(directories) == 2


def test_a_restriction_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    """Functions that were jitted for another CPU must not be used as portable ones."""
    code = "import numba; numba.njit(lambda x: x); import stages.worker"
    # On a CPU without AVX-512 this process has already set numba to the portable CPU, which a child would inherit.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = {**inherited, "STARLING_ISA": "portable", "STARLING_HOME": str(tmp_path)}
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
    make_old_caches(tmp_path)
    environment = {**os.environ, "STARLING_HOME": str(tmp_path), "STARLING_ISA": "portable"}
    code = "import stages.worker; print(stages.worker.settle.__module__)"
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert {"kernels-0", "kernels-1", "kernels-2"} <= left
    assert len(left) == 4


def test_a_cache_that_another_process_removes_meanwhile_ends_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old_caches(tmp_path)
    found = list((tmp_path / "cache").glob("kernels-*"))
    shutil.rmtree(tmp_path / "cache" / "kernels-7")
    monkeypatch.setattr(Path, "glob", lambda path, pattern: found)
    features._prune(tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [f"kernels-{days}" for days in range(4)]
