"""Which instructions the kernels may use, and where compiled kernels are kept.

`settle` sets numba's cache directory and target CPU, which numba reads once: the package `stages.worker` calls it when
it is imported, before anything is jitted.  `STARLING_ISA` restricts the choice:

    portable   x86-64-v3 (AVX2, FMA, F16C), the minimum
    avx-vnni   the same with AVX-VNNI, the dot product of VNNI in registers of 256 bits
    vnni       512-bit AVX-512 with VNNI
    amx        `vnni` with AMX tiles for 16 tokens and more of every quantized format
    native     the best of these that the CPU has (default); tiles only for formats, and from as many tokens on, for
               which amx_verdict.py has found them faster
    tiles      the kernels of `amx` with emulated tiles (amx_tiles.py), for tests where there is no AMX
    dots       those of `avx-vnni` with emulated dot products (dots.py), for tests where there is no AVX-VNNI

`STARLING_AMX_FORMATS`, such as `Q4_1:32,Q8_0`, replaces that choice under `amx`, `tiles` and `native` on a CPU with
AMX: the formats named use tiles from so many tokens of a product on, from 16 where no number is given.

All give the same bytes (docs/numerics.md); restrictions are for tests and comparisons.

What uses tiles is data (activations_arena.py), not code: so kernels are compiled once, before anything is timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.runtime import cpu
from stages.worker.kernels.formats import QUANTIZED

MINIMUM = ("avx2", "fma", "f16c", "bmi2")
AVX_VNNI_NEEDS = ("avxvnni",)
VNNI_NEEDS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
AMX_NEEDS = ("amx-tile", "amx-int8")
UNUSED = ("avx512fp16",)  # LLVM's names of features that a CPU may have
KEPT_CACHES = 4
ISAS = ("portable", "avx-vnni", "vnni", "amx", "native", "tiles", "dots")
ALL_FORMATS = frozenset(f.name for f in QUANTIZED)
TILE_TOKENS = 16  # tokens, and rows, of a tile product
MOST_TOKENS = 1 << 16  # bound of a number of tokens in STARLING_AMX_FORMATS: no step has so many

# The formats whose products use tiles, by name, and the tokens of a product from which on they do.
Thresholds = tuple[tuple[str, int], ...]
ALL_TILES: Thresholds = tuple((name, TILE_TOKENS) for name in sorted(ALL_FORMATS))

_SHOW_CPU = (
    "import json, llvmlite.binding as llvm;"
    "print(json.dumps([llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]))"
)
_PORTABLE_CPU = "x86-64-v3"
_PORTABLE_FEATURES = "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2,+ssse3"
# Instruction sets whose kernels are compiled for no CPU in particular.
_FIXED_TARGETS = {
    "portable": (_PORTABLE_CPU, _PORTABLE_FEATURES),
    "avx-vnni": (_PORTABLE_CPU, f"{_PORTABLE_FEATURES},+avxvnni"),
    "dots": (_PORTABLE_CPU, _PORTABLE_FEATURES),
}


# Names of the kernel (/proc/cpuinfo) that differ from LLVM's.
_KERNEL_NAMES = {"avx_vnni": "avxvnni", "avx512_vnni": "avx512vnni", "amx_tile": "amx-tile", "amx_int8": "amx-int8"}
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")  # of /proc/cpuinfo


class UnsupportedCpu(ConfigError):
    """This CPU cannot run the kernels, or not those that STARLING_ISA names; the message lists what it lacks."""


def starling_home() -> Path:
    """The directory of models, state and caches: `STARLING_HOME`, or ~/.starling."""
    return Path(os.environ.get("STARLING_HOME") or Path.home() / ".starling")


def host_features() -> dict[str, bool]:
    """This CPU's features that the system supports, by LLVM's names. Needs no compiler."""
    return {_KERNEL_NAMES.get(name, name): True for name in cpu.fields().get("flags", "").split()}


def choose_isa(host: dict[str, bool], wanted: str) -> str:
    """The instruction set, as at the top of the file but for `native`, for a CPU with the features `host`.

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
    needs = {
        "avx-vnni": AVX_VNNI_NEEDS,
        "vnni": VNNI_NEEDS,
        "tiles": VNNI_NEEDS,
        "amx": VNNI_NEEDS + AMX_NEEDS,
    }
    lacks = [name for name in needs.get(wanted, ()) if not host.get(name)]
    if lacks:
        raise UnsupportedCpu(f"STARLING_ISA is {wanted!r} but this CPU lacks {', '.join(lacks)}")
    if wanted != "native":
        return wanted
    best_first = ("amx", "vnni", "avx-vnni")
    return next((name for name in best_first if all(host.get(feature) for feature in needs[name])), "portable")


def permit_amx() -> None:
    """Ask Linux for this process's use of AMX tiles (arch_prctl, ARCH_REQ_XCOMP_PERM for XTILEDATA).

    Raises `UnsupportedCpu` with the system's reason.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(158, 0x1023, 18) != 0:
        raise UnsupportedCpu(f"the system does not permit AMX tiles: {os.strerror(ctypes.get_errno())}")


@functools.cache
def isa() -> str:
    """The instruction set of this process's kernels. For AMX, requests permission."""
    wanted = os.environ.get("STARLING_ISA") or "native"
    chosen = choose_isa(host_features(), wanted)
    if chosen != "amx":
        return chosen
    named_thresholds()
    try:
        permit_amx()
    except UnsupportedCpu:
        if wanted == "amx":
            raise
        return "vnni"
    return chosen


def named_thresholds() -> Thresholds:
    """What STARLING_AMX_FORMATS names; empty without it. Raises `UnsupportedCpu` for what it cannot name."""
    found: dict[str, int] = {}
    for item in filter(None, os.environ.get("STARLING_AMX_FORMATS", "").split(",")):
        name, colon, number = item.partition(":")
        if name not in ALL_FORMATS:
            raise UnsupportedCpu(
                f"STARLING_AMX_FORMATS names {name[:80]}, expected some of {', '.join(sorted(ALL_FORMATS))}"
            )
        if name in found:
            raise UnsupportedCpu(f"STARLING_AMX_FORMATS names {name} twice, expected each format once")
        is_number = number.isascii() and number.isdigit() and len(number) <= len(str(MOST_TOKENS))
        tokens = int(number) if is_number else 0
        if colon and not TILE_TOKENS <= tokens <= MOST_TOKENS:
            raise UnsupportedCpu(
                f"STARLING_AMX_FORMATS has {item[:80]!r}, expected {name}:TOKENS with TOKENS from {TILE_TOKENS} to "
                f"{MOST_TOKENS}"
            )
        found[name] = tokens if colon else TILE_TOKENS
    return tuple(sorted(found.items()))


def target(name: str) -> tuple[str, str]:
    """LLVM's CPU name and feature string that the kernels of an instruction set are compiled for.

    Asks LLVM in a process of its own, so that this one does not hold the compiler for its whole life.
    """
    if name in _FIXED_TARGETS:
        return _FIXED_TARGETS[name]
    cpu, features = json.loads(
        subprocess.run([sys.executable, "-P", "-c", _SHOW_CPU], capture_output=True, check=True).stdout
    )
    return str(cpu), without_unused(features)


def without_unused(features: str) -> str:
    """LLVM's feature string with those of UNUSED turned off.

    With AVX512-FP16 it would convert half floats by other instructions than F16C's, no faster ones, whose bytes CPUs
    without them cannot be compared with.
    """
    return ",".join("-" + feature[1:] if feature[1:] in UNUSED else feature for feature in features.split(","))


def _stored_target(name: str, directory: Path) -> tuple[str, str]:
    """`target`, stored with the kernel cache, so that a process that only loads kernels does not import llvmlite."""
    path = directory / "target.json"
    try:
        cpu, features = json.loads(path.read_text())
        return str(cpu), str(features)
    except (OSError, ValueError):
        found = target(name)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(found))
        part.replace(path)
        return found


def _identity(name: str) -> tuple[str, ...]:
    """What identifies the CPU that the kernels of an instruction set are compiled for."""
    if name in _FIXED_TARGETS:
        return _FIXED_TARGETS[name]
    return tuple(cpu.fields().get(field, "") for field in _IDENTITY)


def _version(package: str) -> str:
    """The name of the directory that describes an installed package, which has its version.

    `importlib.metadata` finds the version, too, but its imports take 20 ms and 2 MB.
    """
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    found = [path.name for place in places or () for path in Path(place).parent.glob(f"{package}-*.dist-info")]
    if len(found) == 1:
        return found[0]
    from importlib.metadata import version

    return version(package)


@functools.cache
def cache_key(name: str) -> str:
    """Hash of all that compiled kernels depend on: sources, target CPU, compilers.

    Numba itself looks only at the file of a jitted function, not at the intrinsics it uses. Another installation of
    the same sources has the same hash.
    """
    h = hashlib.sha256()
    here = Path(__file__).parent
    # Modules outside of this package that kernels call, or whose constants are compiled into them.
    root = here.parents[2]
    outside = [root / "shm" / f"{name}.py" for name in ("atomics", "barrier", "pages", "sampler_steps", "step_ring")]
    for path in [
        *sorted(here.rglob("*.py")),
        here.parent / "activations_arena.py",
        root / "pipeline" / "native" / "lean_numba.py",
        root / "pipeline" / "native" / "link_once.py",
        *outside,
    ]:
        h.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    h.update("|".join((name, *_identity(name), sys.version)).encode())
    for package in ("numba", "llvmlite", "numpy"):
        h.update(f"|{package} {_version(package)}".encode())
    return h.hexdigest()[:16]


def cache_dir() -> Path:
    """Where this process's compiled kernels are kept."""
    return starling_home() / "cache" / f"kernels-{cache_key(isa())}"


@functools.cache
def settle() -> str:
    """Point numba at the cache directory and the target CPU, once; returns the ISA.

    Raises `UnsupportedCpu`, or `RuntimeError` when numba was set up for another CPU before.
    """
    directory = cache_dir()
    directory.mkdir(parents=True, exist_ok=True)
    os.utime(directory)
    _prune(directory.parent)
    name, features = _stored_target(isa(), directory)
    os.environ["NUMBA_CACHE_DIR"] = str(directory)
    os.environ["NUMBA_CPU_NAME"] = name
    os.environ["NUMBA_CPU_FEATURES"] = features
    if "numba" in sys.modules:
        _reload(name)
    return isa()


def _reload(name: str) -> None:
    """Make numba read the environment again when it was imported before."""
    import numba
    from numba.core import registry

    # The first jitted function fixes the CPU of all others.
    is_fixed = "_toplevel_target_context" in vars(registry.cpu_target)
    if is_fixed and name != (numba.core.config.CPU_NAME or target("native")[0]):
        raise RuntimeError(f"functions were jitted before `stages.worker` asked for {name}: import it first")
    numba.core.config.reload_config()


def _prune(parent: Path) -> None:
    """Remove caches of other sources and CPUs: all but the last used, and none used today."""
    used: dict[Path, float] = {}
    for path in parent.glob("kernels-*"):
        with contextlib.suppress(OSError):  # another process, which starts as well, has just removed it
            used[path] = path.stat().st_mtime
    stale = sorted(used, key=lambda path: used[path])[:-KEPT_CACHES]
    for path in stale:
        if used[path] < time.time() - 86400:
            shutil.rmtree(path, ignore_errors=True)
