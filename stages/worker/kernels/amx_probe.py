"""For which formats AMX is faster on this machine, and whether it works: a process of its own.

    STARLING_ISA=amx python -m stages.worker.kernels.amx_probe

Multiplies two unpacked chunks of random codes by the same tokens with AMX tiles and with VNNI.  Bytes must be equal for
every format, else the exit code is 1.  With equal bytes it prints a `features.Verdict` as JSON: how many times as fast
the tiles are, for each format.  A system may offer the tiles and not run them (a hypervisor, an emulator), or run them
slowly; the result is stored once (features.py), before any kernel relies on them.

Speed depends on the instruction mix of an unpacked block: products and scalings (two in a format of half blocks, else
one) and minimums.  One format of each mix is timed, and its speedup is that of all formats with this mix.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numba import njit

from stages.worker.kernels import amx, amx_tiles, gemm
from stages.worker.kernels.buffer_sizes import CODE_BYTES, SPILL_BYTES, unpacked_bytes_of
from stages.worker.kernels.features import Verdict
from stages.worker.kernels.format_traits import HAS_HALVES, trait
from stages.worker.kernels.formats import QUANTIZED, QuantizedFormat
from stages.worker.kernels.quantize_activations import RECORD, quantize_rows
from stages.worker.kernels.simd import JIT, address

TOKENS, BLOCKS, ROUNDS = 240, 17, 40  # 17: an odd run of products
REPEATS = 10  # of the products in a timed round, about 1 ms
GAP, STRIDE = 64, 128  # bytes between the two row groups' outputs of a token, and from token to token

# (kind, u, v, x, out, spill, times): compute the products of the chunks at u and at v with all tokens, `times` times.
Products = Callable[[int, int, int, int, int, int, int], None]
Clock = Callable[[], float]


@njit(**JIT)
def by_tiles(kind, u, v, x, out, spill, times):
    """The products with AMX tiles."""
    stride = BLOCKS * RECORD
    for _ in range(times):
        amx_tiles.configure(spill, trait(kind, HAS_HALVES) != 0)
        for t in range(0, TOKENS, amx.TOKENS):
            at, to = x + t * stride, out + t * STRIDE
            amx.quantized_16(kind, u, BLOCKS, at, stride, to, STRIDE, True, spill, u, 0)
            amx.quantized_16(kind, v, BLOCKS, at, stride, to + GAP, STRIDE, True, spill, v, 0)
        amx_tiles.release(spill)


@njit(**JIT)
def by_dots(kind, u, v, x, out, spill, times):
    """The products with VNNI. From two chunks: LLVM would merge the dot products of one chunk with itself."""
    stride = BLOCKS * RECORD
    for _ in range(times):
        for t in range(0, TOKENS, 6):
            at, to = x + t * stride, out + t * STRIDE
            gemm._quantized_6(kind, u, v, BLOCKS, at, stride, to, STRIDE, GAP, True, u, v, 0)


@njit(**JIT)
def _records(values, n, to):
    quantize_rows(address(values), 4 * n, n, to, BLOCKS * RECORD, 0, TOKENS)


def _aligned(nbytes: int) -> tuple[np.ndarray, int]:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes], raw.ctypes.data + start


def _chunk(fmt: QuantizedFormat, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """An unpacked chunk of random codes and factors."""
    size = unpacked_bytes_of(fmt)
    chunk, at = _aligned(BLOCKS * size)
    blocks = chunk.reshape(BLOCKS, size)
    blocks[:, :CODE_BYTES] = rng.integers(0, fmt.codes.largest + 1, (BLOCKS, CODE_BYTES), dtype=np.uint8)
    factors = rng.normal(size=(BLOCKS, (size - CODE_BYTES) // 4)).astype(np.float32)
    blocks[:, CODE_BYTES:] = factors.view(np.uint8)
    return chunk, at


def instruction_mix(fmt: QuantizedFormat) -> tuple[bool, bool]:
    """What an unpacked block of the format takes: two products and scalings or one, and minimums or none."""
    return bool(fmt.scales.halves), bool(fmt.scales.minimum)


def speedup(tiles: Callable[[], None], dots: Callable[[], None], rounds: int, clock: Clock) -> float:
    """Time of `dots` / time of `tiles`: the median over rounds, each of which runs both one after the other."""
    ratios = []
    for _ in range(rounds):
        begun = clock()
        tiles()
        between = clock()
        dots()
        ratios.append((clock() - between) / (between - begun))
    return float(np.median(ratios))


def compare(
    rounds: int = ROUNDS,
    tiles: Products = by_tiles,
    dots: Products = by_dots,
    clock: Clock = time.perf_counter,
) -> tuple[bool, dict[str, float]]:
    """Whether all bytes are equal, and by format how many times as fast the tiles are."""
    rng = np.random.default_rng(1)
    n = BLOCKS * 32
    records, x = _aligned(TOKENS * BLOCKS * RECORD)
    scratch, spill = _aligned(SPILL_BYTES)
    values = rng.normal(size=(TOKENS, n)).astype(np.float32)
    values[1], values[2, :32] = 0, np.inf
    _records(values, n, x)
    same, by_mix = True, dict[tuple[bool, bool], float]()
    for fmt in QUANTIZED:
        (first, u), (second, v) = _chunk(fmt, rng), _chunk(fmt, rng)
        (tiled, tiled_at), (dotted, dotted_at) = (_aligned(TOKENS * STRIDE) for _ in range(2))
        tiles(fmt.id, u, v, x, tiled_at, spill, 1)
        dots(fmt.id, u, v, x, dotted_at, spill, 1)
        same = same and tiled.tobytes() == dotted.tobytes()
        if (mix := instruction_mix(fmt)) not in by_mix:
            by_mix[mix] = speedup(
                partial(tiles, fmt.id, u, v, x, tiled_at, spill, REPEATS),
                partial(dots, fmt.id, u, v, x, dotted_at, spill, REPEATS),
                rounds,
                clock,
            )
        del first, second
    del records, scratch
    return same, {fmt.name: by_mix[instruction_mix(fmt)] for fmt in QUANTIZED}


def main() -> int:
    """Print the verdict, or the reason against AMX; returns the exit code."""
    same, speedups = compare()
    if not same:
        print("AMX tiles do not give the bytes that VNNI gives")
        return 1
    print(json.dumps(Verdict(speedups, "")._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
