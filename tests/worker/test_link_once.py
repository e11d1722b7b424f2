"""An entry becomes machine code once, with all functions that it calls, and needs nothing but libc."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.native.object_code import ObjectCode

pytestmark = pytest.mark.slow

# `shared` is called at two levels, so that the order in which LLVM links the functions matters.
COMPILE = """
import json, operator, sys
from pipeline.native import link_once
import stages.worker
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.simd import JIT
from numba import njit
from numba.core import codegen, cpu, ir
from numba.core.targetconfig import TargetConfig
from numba.core.types.functions import BaseFunction

@njit(**JIT)
def shared(a): return min(a, 100) * 3
@njit(**MERGED)
def merged(a): return a + 1
@njit(**INNER)
def inner(a, b):
    total = merged(a) - a - 1
    for i in range(a):
        total += shared(b + i)
    return total
@njit(**JIT)
def outer(a, b): return inner(a, b) + shared(a)
@njit(**JIT)
def pair(a): return a, a

ran = {"optimized": 0, "in the engine": 0, "wrapped": 0, "copied": 0}
resolved = []
def count(owner, name, as_what):
    original = getattr(owner, name)
    def counted(*arguments, **options):
        ran[as_what] += 1
        return original(*arguments, **options)
    setattr(owner, name, counted)
resolve = BaseFunction.get_call_type
def resolving(self, context, args, kws):
    if self.typing_key in vars(operator).values():
        resolved.append(f"{self.key} {args}")
    return resolve(self, context, args, kws)
BaseFunction.get_call_type = resolving
count(cpu.CPUContext, "create_cpython_wrapper", "wrapped")
count(cpu.CPUContext, "create_cfunc_wrapper", "wrapped")
count(ir.Scope, "__reduce_ex__", "copied")
count(ir.Loc, "__reduce_ex__", "copied")
repeated = [(ir.Inst, "_rec_list_vars"), (TargetConfig, "values")]
originals = [getattr(*one) for one in repeated]
link_once.install()
compared = [0, 0]
def compare(n, owner, name):
    made = getattr(owner, name)
    assert made is not originals[n]
    def both(*arguments):
        found = made(*arguments)
        assert found == originals[n](*arguments)
        compared[n] += bool(found)
        return found
    setattr(owner, name, both)
for n, one in enumerate(repeated):
    compare(n, *one)
count(codegen.CPUCodeLibrary, "_optimize_final_module", "optimized")
count(codegen.JITCPUCodegen, "_add_module", "in the engine")
code, symbol = link_once.entry_object(outer, 2, INNER)
open(sys.argv[1], "wb").write(code)
error = ""
try:
    link_once.entry_object(pair, 1, INNER)
except TypeError as refused:
    error = str(refused)
print(json.dumps([symbol, ran, error, resolved, compared]))
"""


def test_callees_are_linked_and_optimized_once(tmp_path: Path) -> None:
    path, script = tmp_path / "outer.o", tmp_path / "compile.py"
    script.write_text(COMPILE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    symbol, ran, error, resolved, compared = json.loads(done.stdout)
    assert ran == {"optimized": 1, "in the engine": 0, "wrapped": 0, "copied": 0}
    assert resolved and len(resolved) == len(set(resolved))
    assert all(compared)
    assert "pair returns" in error and "not int64 or nothing" in error

    raw = path.read_bytes()
    assert b"_ZN7cpython" not in raw  # no wrappers: no Python calls it through numba
    code = ObjectCode(raw)
    result, exception = ctypes.c_int64(), ctypes.c_void_p()
    pointers = (ctypes.c_void_p, ctypes.c_void_p)
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *pointers, ctypes.c_int64, ctypes.c_int64)(code.address(symbol))
    assert call(ctypes.byref(result), ctypes.byref(exception), 4, 98) == 0
    assert result.value == 3 * (98 + 99 + 100 + 100) + 12
