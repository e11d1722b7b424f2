"""Whether AMX works on this machine and is faster: a process of its own, whose exit code is 0 if both hold.

    STARLING_ISA=amx python -m stages.worker.kernels.amx_probe

Multiplies unpacked chunks of random codes by 16 tokens at a time with AMX tiles and with VNNI, for every format:
bytes must be equal and AMX faster. A system may offer the tiles and not run them (a hypervisor, an emulator), or run
them slowly; the result is stored once (features.py), before any kernel relies on them.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numba import njit

from stages.worker.kernels import amx, gemm
from stages.worker.kernels.block_codegen import CODE_BYTES, unpacked_bytes
from stages.worker.kernels.formats import QUANTIZED
from stages.worker.kernels.quantize_activations import RECORD, quantize_rows
from stages.worker.kernels.simd import JIT, address

TOKENS, BLOCKS, ROUNDS = 240, 16, 40
DECIDING = ("Q4_0", "Q4_1", "Q8_0", "Q6_K")  # formats whose speed decides; all kinds of blocks must give equal bytes


@njit(**JIT)
def _by_tiles(kind, u, x, out, spill):
    amx.configure(spill)
    for t in range(0, TOKENS, amx.TOKENS):
        amx.quantized_16(
            kind,
            u,
            BLOCKS,
            x + t * BLOCKS * RECORD,
            BLOCKS * RECORD,
            out + t * 64,
            64,
            True,
            spill,
            u,
            0,
        )
    amx.release()


@njit(**JIT)
def _by_dots(kind, u, x, out, spill):
    for t in range(0, TOKENS, 6):
        at = x + t * BLOCKS * RECORD
        gemm._quantized_6(kind, u, u, BLOCKS, at, BLOCKS * RECORD, out + t * 64, 64, 0, True, u, u, 0)


@njit(**JIT)
def _many_times(by_tiles, kind, u, x, out, spill, times):
    for _ in range(times):
        if by_tiles:
            _by_tiles(kind, u, x, out, spill)
        else:
            _by_dots(kind, u, x, out, spill)


@njit(**JIT)
def _records(values, n, to):
    quantize_rows(address(values), 4 * n, n, to, BLOCKS * RECORD, 0, TOKENS)


def _aligned(nbytes: int) -> tuple[np.ndarray, int]:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes], raw.ctypes.data + start


def compare(rounds: int = ROUNDS) -> tuple[bool, float]:
    """Whether all bytes are equal, and how many times as fast the tiles are (medians over `rounds`).

    The other side computes each row group twice, as it does for the last of an odd number: it counts half.
    """
    rng = np.random.default_rng(1)
    n = BLOCKS * 32
    records, x = _aligned(TOKENS * BLOCKS * RECORD)
    scratch, spill = _aligned(amx.SPILL_BYTES)
    values = rng.normal(size=(TOKENS, n)).astype(np.float32)
    values[1], values[2, :32] = 0, np.inf
    _records(values, n, x)
    same, ratios = True, []
    for fmt in QUANTIZED:
        size = unpacked_bytes(fmt)
        codes, u = _aligned(BLOCKS * size)
        blocks = codes.reshape(BLOCKS, size)
        blocks[:, :CODE_BYTES] = rng.integers(0, fmt.codes.largest + 1, (BLOCKS, CODE_BYTES), dtype=np.uint8)
        factors = rng.normal(size=(BLOCKS, (size - CODE_BYTES) // 4)).astype(np.float32)
        blocks[:, CODE_BYTES:] = factors.view(np.uint8)
        outs = [_aligned(TOKENS * 64) for _ in range(2)]
        times: list[list[float]] = [[], []]
        decides = fmt.name in DECIDING
        for _ in range(rounds if decides else 1):
            for i, (_, out) in enumerate(outs):
                begun = time.perf_counter()
                _many_times(i == 0, fmt.id, u, x, out, spill, 20)
                times[i].append(time.perf_counter() - begun)
        same = same and outs[0][0].tobytes() == outs[1][0].tobytes()
        if decides:
            ratios.append(float(np.median(times[1])) / 2 / float(np.median(times[0])))
    del records, scratch
    return same, min(ratios)


def main() -> int:
    """Print the reason against AMX, if there is one; returns the exit code."""
    same, ratio = compare()
    if not same:
        print("AMX tiles do not give the bytes that VNNI gives")
    elif ratio < 1:
        print(f"AMX tiles take {1 / ratio:.2f} times as long as VNNI")
    return 0 if same and ratio >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
