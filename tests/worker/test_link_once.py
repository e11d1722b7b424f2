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


# Arguments: a path, and whether Numba is changed.  `recursive` calls itself, so that its type is found in rounds.
COMPILE_TWICE = """
import sys
from pipeline.native import lean_numba, link_once
import stages.worker
from stages.worker.kernels import dequantize_row, quantize_activations
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.simd import f32_tile, get_f32, load_f32, put_f32, store_f32, tile_get, tile_put
from numba import njit

if sys.argv[2] == "plain":
    lean_numba.install = lambda: None

@njit(**MERGED)
def swapped(pair): return pair[1], pair[0]
@njit(**INNER)
def recursive(n):
    if n < 2:
        return 1
    return n * recursive(n - 1)
@njit(**INNER)
def flagged(n, is_odd, step=2):
    total = 0.5
    while n > 0:
        total = total * n if is_odd else total - n / 3
        n -= step
    return total
@njit(**INNER)
def several(a, b, c):
    acc, pair = f32_tile(2), (a, b)
    for i in range(0, c, 16):
        if i % 32 == 0 and c > 7:
            pair = swapped(pair)
        elif get_f32(b) > 1.5:
            continue
        acc = tile_put(acc, 1, load_f32(pair[0] + 4 * i) * tile_get(acc, 0) + load_f32(pair[1]))
    store_f32(a, tile_get(acc, 1))
    quantize_activations.quantize_row(a, c, b)
    put_f32(a, flagged(c, True) + flagged(c, False, step=3))
    return recursive(c)

for n, (function, arguments) in enumerate(((several, 3), (dequantize_row.dequantize_row, 5))):
    if n == 0:
        link_once.install()
    with open(f"{sys.argv[1]}.{n}", "wb") as file:
        file.write(link_once.entry_object(function, arguments, INNER)[0])
@njit(**INNER)
def wrong(a): return a + "text"
try:
    link_once.entry_object(wrong, 1, INNER)
except Exception as error:
    print(error)
"""


def test_the_lean_compiler_makes_the_same_code(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(COMPILE_TWICE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    errors = []
    for kind in ("plain", "lean"):
        command = [sys.executable, str(script), str(tmp_path / kind), kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        errors.append(done.stdout)
    for n in range(2):
        plain, lean = ((tmp_path / f"{kind}.{n}").read_bytes() for kind in ("plain", "lean"))
        assert len(plain) > 1000
        assert plain == lean
    for text in errors:
        assert "unicode_type" in text and "typing of intrinsic-call at" in text and "compile.py" in text
