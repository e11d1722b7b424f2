"""Compiles entries (entries.py) into the kernel cache: a process of its own, because it needs numba.

    python -m stages.worker.kernels.compile_entries f16 PID      compile the entries named on stdin, one a line

PID is the parent process, with which the compiler ends.  build.py starts it.  Its job `PROBE` is no entry: it runs the
AMX probe with the stored products, and what that has found follows the job's name in the answer.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from pipeline.native import link_once
from pipeline.runtime import process
from stages.worker.kernels import (
    adapters,
    amx_verdict,
    attention,
    build,
    dequantize_row,
    experts,
    fit_k,
    matmul,
    pack_units,
    quantize_blocks,
    rank_loop,
    sampler,
    score_head,
    stored_code,
)
from stages.worker.kernels.entries import INNER

# By name: the jitted function for a type of KV cache, and the number of its arguments.
FUNCTIONS: dict[str, tuple[Callable[[str], Any], int]] = {
    "matmul": (lambda kv_type: matmul.matmul, matmul.ENTRY_ARGUMENTS),
    "attend": (lambda kv_type: attention.ENTRIES[kv_type], attention.ENTRY_ARGUMENTS),
    "steps": (lambda kv_type: rank_loop.run_steps, rank_loop.ENTRY_ARGUMENTS),
    "draw": (lambda kv_type: sampler.draw, sampler.ENTRY_ARGUMENTS),
    "embed": (lambda kv_type: dequantize_row.dequantize_row, dequantize_row.ENTRY_ARGUMENTS),
    "head": (lambda kv_type: rank_loop.wait_for_head, rank_loop.HEAD_ARGUMENTS),
    "experts": (lambda kv_type: experts.mix_experts, experts.ENTRY_ARGUMENTS),
    "shrink": (lambda kv_type: adapters.shrink, adapters.SHRINK_ARGUMENTS),
    "expand": (lambda kv_type: adapters.expand, adapters.EXPAND_ARGUMENTS),
    "find_adapter": (lambda kv_type: adapters.find_adapter, adapters.FIND_ARGUMENTS),
    "fit_k": (lambda kv_type: fit_k.fit_k, fit_k.ENTRY_ARGUMENTS),
    "pack_units": (lambda kv_type: pack_units.pack_units, pack_units.ENTRY_ARGUMENTS),
    "quantize_blocks": (lambda kv_type: quantize_blocks.quantize_blocks, quantize_blocks.ENTRY_ARGUMENTS),
    "score_head": (lambda kv_type: score_head.score_pair, score_head.ENTRY_ARGUMENTS),
    "list_adapted": (lambda kv_type: adapters.list_adapted, adapters.LIST_ARGUMENTS),
}
assert FUNCTIONS.keys() == stored_code.ENTRIES.keys() | stored_code.EXTRA_ENTRIES.keys()


def compile_entry(name: str, kv_type: str) -> None:
    """Compile one entry and store its object code."""
    function, arguments = FUNCTIONS[name]
    code, symbol = link_once.entry_object(function(kv_type), arguments, INNER)
    stored_code.store(name, kv_type, code, symbol)


def main(arguments: list[str]) -> None:
    """Compile entries until stdin ends, without garbage collection, which would cost an eighth of the time."""
    kv_type, parent = arguments
    process.die_with_parent(int(parent))
    gc.disable()
    link_once.install()
    for line in sys.stdin:
        answer = line.strip()
        if answer == build.PROBE:
            answer += "\t" + amx_verdict.find_verdict().encode()
        else:
            compile_entry(answer, kv_type)
        print(answer, flush=True)
        gc.collect()  # the next one starts from little


if __name__ == "__main__":
    main(sys.argv[1:])
