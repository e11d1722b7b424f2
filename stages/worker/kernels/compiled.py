"""The compiled kernels, called from Python: loaded from the kernel cache (stored_code.py), without numba.

    addresses("f16")          the entries that the parameter block names; compiles what the cache lacks
    identity("f16")           names these entries by sources, CPU and bytes
    wait_for_head, run_steps  the entries that Python calls; see rank_loop.py
    fit_k, quantize_blocks    likewise, to quantize weights; see fit_k.py, quantize_blocks.py
    pack_units                likewise, to pack them; see pack_units.py
    matmul                    likewise, for the AMX probe; see matmul.py

Each entry is loaded once per process; children of a `fork` share the memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

from pipeline.native.object_code import ObjectCode, ObjectCodeError
from stages.worker.kernels import build, features, stored_code

HEAD_ARGUMENTS, STEPS_ARGUMENTS, FIT_ARGUMENTS, PACK_ARGUMENTS, QUANTIZE_ARGUMENTS = 3, 8, 7, 8, 6
MATMUL_ARGUMENTS = 12


@functools.cache
def _load(name: str, stored_type: str) -> tuple[ObjectCode, int]:
    """An entry's code, which lives as long as this process, and its address. Raises `ObjectCodeError`."""
    return stored_code.load(name, stored_type)


def _addresses(kv_type: str, names: tuple[str, ...]) -> dict[str, int]:
    return {name: _load(name, stored_code.stored_type(name, kv_type))[1] for name in names}


def addresses(kv_type: str, extra: tuple[str, ...] = ()) -> dict[int, int]:
    """The addresses in this process of the entries, and of those of `EXTRA_ENTRIES` named in `extra`, by word of the
    parameter block.

    Compiles entries that are missing or damaged. Raises `RuntimeError` if that fails.
    """
    words = stored_code.ENTRIES | {name: stored_code.EXTRA_ENTRIES[name] for name in extra}
    if not stored_code.is_compiled(kv_type, extra):
        build.build(kv_type, extra=extra)
    try:
        by_name = _addresses(kv_type, tuple(words))
    except ObjectCodeError:  # `load` has removed the damaged entry
        build.build(kv_type, extra=extra)
        by_name = _addresses(kv_type, tuple(words))
    return {word: by_name[name] for name, word in words.items() if word >= 0}


def identity(kv_type: str, extra: tuple[str, ...] = ()) -> str:
    """Names the entries as this process computes with them: their sources, the CPU, and the bytes of each object.

    Loads them as `addresses` does; processes that are forked afterwards have the same. Raises `RuntimeError`.
    """
    addresses(kv_type, extra)
    objects = hashlib.sha256()
    for name in (*stored_code.ENTRIES, *extra):
        objects.update(_load(name, stored_code.stored_type(name, kv_type))[0].digest.encode())
    return f"{features.cache_dir().name}-{objects.hexdigest()[:16]}"


def load_extra(name: str, progress: build.Progress) -> None:
    """Load one entry for any KV cache, which is compiled first if it is missing or damaged. Raises `RuntimeError`."""
    for is_last in (False, True):
        if not stored_code.symbol_path(name, "").exists():
            build.build("", 1, progress, only=(name,))
        try:
            _load(name, stored_code.stored_type(name, ""))
            return
        except ObjectCodeError as error:  # `load` has removed the damaged entry
            if is_last:
                raise RuntimeError(str(error)) from None


class _Function:
    """An entry as a Python function of integers. Releases the interpreter lock while it runs.

    Numba's calling convention (numba.core.callconv.CPUCallConv): a status is returned; pointers to the result and to
    the description of an exception precede the arguments.
    """

    def __init__(self, name: str, arguments: int) -> None:
        address = _load(name, stored_code.stored_type(name, ""))[1]
        pointers = (ctypes.c_void_p, ctypes.c_void_p)
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, *pointers, *(ctypes.c_int64,) * arguments)(address)

    def __call__(self, *arguments: int) -> int:
        """The entry's result."""
        result, exception = ctypes.c_int64(), ctypes.c_void_p()
        status = self._call(ctypes.byref(result), ctypes.byref(exception), *arguments)
        if status:
            raise RuntimeError(f"a kernel ended with status {status}")
        return result.value


_function = functools.cache(_Function)


def wait_for_head(control: int, step: int, limit_ns: int) -> bool:
    """`rank_loop.wait_for_head`. Call `addresses` first."""
    return bool(_function("head", HEAD_ARGUMENTS)(control, step, limit_ns))


def run_steps(
    params: int, control: int, number: int, step: int, timing: int, limit_ns: int, ring: int, bell: int
) -> int:
    """`rank_loop.run_steps`. Call `addresses` first."""
    return _function("steps", STEPS_ARGUMENTS)(params, control, number, step, timing, limit_ns, ring, bell)


def fit_k(kind: int, x: int, n: int, codes: int, scale: int, least: int, scratch: int) -> None:
    """`fit_k.fit_k`. Call `load_extra` first."""
    _function("fit_k", FIT_ARGUMENTS)(kind, x, n, codes, scale, least, scratch)


def pack_units(
    program: int, source: int, groups: int, units: int, source_bytes: int, out: int, unit_bytes: int, scratch: int
) -> None:
    """`pack_units.pack_units`. Call `load_extra` first."""
    _function("pack_units", PACK_ARGUMENTS)(program, source, groups, units, source_bytes, out, unit_bytes, scratch)


def quantize_blocks(kind: int, bits: int, dense: int, source: int, blocks: int, out: int) -> int:
    """`quantize_blocks.quantize_blocks`. Call `load_extra` first."""
    return _function("quantize_blocks", QUANTIZE_ARGUMENTS)(kind, bits, dense, source, blocks, out)


def matmul(
    kind: int,
    w: int,
    columns: int,
    first: int,
    end: int,
    x: int,
    x_stride: int,
    packed: int,
    tokens: int,
    out: int,
    out_stride: int,
    scratch: int,
) -> None:
    """`matmul.matmul`. Call `load_extra` first."""
    arguments = (kind, w, columns, first, end, x, x_stride, packed, tokens, out, out_stride, scratch)
    _function("matmul", MATMUL_ARGUMENTS)(*arguments)
