"""Which instructions the kernels may use, and where compiled kernels are kept.

`settle` tells numba its cache directory and target CPU, which numba takes up once: the package
`stages.worker` calls it when it is imported, before anything is jitted.  `STARLING_ISA` restricts:

    portable   x86-64-v3 (AVX2, FMA, F16C), the minimum
    vnni       512-bit AVX-512 with VNNI
    native     the best of these that the CPU has (default)

All of them give the same bytes (docs/numerics.md); a restriction is for tests and for comparing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from pathlib import Path

import llvmlite.binding as llvm

from pipeline.errors import ConfigError

MINIMUM = ("avx2", "fma", "f16c", "bmi2")
VNNI_NEEDS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
KEPT_CACHES = 4
ISAS = ("portable", "vnni", "native")
_PORTABLE_CPU = "x86-64-v3"
_PORTABLE_FEATURES = "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2,+ssse3"


class UnsupportedCpu(ConfigError):
    """This CPU cannot run the kernels (or not the ones asked for); the message says what it lacks."""


def starling_home() -> Path:
    """The directory of models, state and caches: `STARLING_HOME`, or ~/.starling."""
    return Path(os.environ.get("STARLING_HOME") or Path.home() / ".starling")


def choose_isa(host: dict[str, bool], wanted: str) -> str:
    """`portable` or `vnni` for a CPU with the features `host`.

    Raises `UnsupportedCpu` below the minimum or when `wanted` needs what the CPU lacks.
    """
    missing = [name for name in MINIMUM if not host.get(name)]
    if missing:
        raise UnsupportedCpu(
            f"this CPU lacks {', '.join(missing)}; the kernels need x86-64-v3 "
            f"({', '.join(MINIMUM)}): Intel Haswell (2013) or AMD Excavator (2015) and later"
        )
    if wanted not in ISAS:
        raise UnsupportedCpu(f"STARLING_ISA is {wanted!r}, expected one of {', '.join(ISAS)}")
    lacks = [name for name in VNNI_NEEDS if not host.get(name)]
    if wanted == "vnni" and lacks:
        raise UnsupportedCpu(f"STARLING_ISA is 'vnni' but this CPU lacks {', '.join(lacks)}")
    if wanted == "portable" or lacks:
        return "portable"
    return "vnni"


@functools.cache
def isa() -> str:
    """The instruction set of this process's kernels."""
    return choose_isa(dict(llvm.get_host_cpu_features()), os.environ.get("STARLING_ISA") or "native")


def target() -> tuple[str, str]:
    """LLVM's CPU name and feature string that the kernels are compiled for."""
    if isa() == "portable":
        return _PORTABLE_CPU, _PORTABLE_FEATURES
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@functools.cache
def cache_key() -> str:
    """Hash of all that compiled kernels depend on: their sources, the target CPU, the compilers.

    Numba itself looks only at the file of a jitted function, not at the intrinsics it uses.
    """
    h = hashlib.sha256()
    here = Path(__file__).parent
    # What kernels call and the constants that are compiled into them, wherever these stand.
    outside = [here.parents[2] / "shm" / f"{name}.py" for name in ("atomics", "barrier", "pages", "steps")]
    for path in [*sorted(here.rglob("*.py")), here.parent / "activations.py", here.parent / "layout.py", *outside]:
        h.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    # Numba finds its files by the path of the source: another checkout has nothing of this one's.
    h.update("|".join((str(here.resolve()), isa(), *target(), sys.version)).encode())
    for package in ("numba", "llvmlite", "numpy"):
        h.update(f"|{package} {importlib.metadata.version(package)}".encode())
    return h.hexdigest()[:16]


def cache_dir() -> Path:
    """Where this process's compiled kernels are kept."""
    return starling_home() / "cache" / f"kernels-{cache_key()}"


@functools.cache
def settle() -> str:
    """Point numba at the cache directory and the target CPU, once; returns the ISA.

    Raises `UnsupportedCpu`, or `RuntimeError` when numba was set up for another CPU before.
    """
    name, features = target()
    directory = cache_dir()
    directory.mkdir(parents=True, exist_ok=True)
    os.utime(directory)
    _prune(directory.parent)
    os.environ["NUMBA_CACHE_DIR"] = str(directory)
    os.environ["NUMBA_CPU_NAME"] = name
    os.environ["NUMBA_CPU_FEATURES"] = features
    if "numba" in sys.modules:
        _reload(name)
    return isa()


def _reload(name: str) -> None:
    """Make a numba that was imported already take up the environment."""
    import numba
    from numba.core import registry

    # The first jitted function fixes the CPU of all others.
    is_fixed = "_toplevel_target_context" in vars(registry.cpu_target)
    if is_fixed and name != (numba.core.config.CPU_NAME or llvm.get_host_cpu_name()):
        raise RuntimeError(f"functions were jitted before `stages.worker` asked for {name}: import it first")
    numba.core.config.reload_config()


def _prune(parent: Path) -> None:
    """Remove caches of other sources and CPUs: all but the last used, and none used today."""
    used = {path: path.stat().st_mtime for path in parent.glob("kernels-*")}
    stale = sorted(used, key=lambda path: used[path])[:-KEPT_CACHES]
    for path in stale:
        if used[path] < time.time() - 86400:
            shutil.rmtree(path, ignore_errors=True)
