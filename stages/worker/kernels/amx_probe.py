"""For which formats, and from how many tokens on, AMX is faster, and whether it works: a process of its own.

    STARLING_ISA=amx python -m stages.worker.kernels.amx_probe [ROUNDS ROWS]

Multiplies a matrix of ROWS rows of random codes by the same tokens as the server does, with AMX tiles (amx_gemm.py) and
with VNNI (gemm.py), and prints an `amx_verdict.Verdict` as JSON: how many times as fast the tiles are, for each format
at each of `PROBED_TOKENS`.  Bytes must be equal for every format and number of tokens, else the verdict is against AMX.
A system may offer the tiles and not run them (a hypervisor, an emulator), or run them slowly; the verdict is stored
once (amx_verdict.py), before any group relies on them.  Without a verdict the exit code is not 0.

Speed depends on the format: on the products and scalings of a block (two in a format of half blocks, else one), on
minimums, and on what it takes to unpack one, which tiles do between other work for few tokens.  It also depends on the
number of tokens: with few of them, reading and unpacking weights is a larger part, and the tiles are shaped, filled and
emptied more often.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pipeline.runtime import process

if __name__ == "__main__":
    process.die_with_parent()  # before the imports, which take a second

import numpy as np
from numba import njit

from stages.worker.kernels import compiled
from stages.worker.kernels.amx_verdict import PROBED_TOKENS, Verdict
from stages.worker.kernels.buffer_sizes import MATMUL_BYTES, packed_bytes, row_bytes
from stages.worker.kernels.formats import GROUP, QUANTIZED, QuantizedFormat
from stages.worker.kernels.packed_activations import pack_rows
from stages.worker.kernels.quantize_activations import quantize_rows
from stages.worker.kernels.simd import JIT, address

ROWS, COLUMNS = 4096, 2048  # 3 to 9 MB of weights: more than a core's second-level cache holds
ROUNDS = 15  # at most, of which the median counts
AGREEING = 5  # rounds that are enough if the same side is faster in all of them
REPEATED = 64  # tokens of a timed round, about 2 ms: products of fewer are repeated
STRIDE = row_bytes(COLUMNS)


class Product(NamedTuple):
    """A matrix of `rows` x COLUMNS in `.bin` bytes times some tokens; addresses of 64-byte aligned buffers."""

    fmt: QuantizedFormat
    rows: int
    tokens: int
    w: int
    x: int
    packed: int  # the records at x, for tiles
    out: int
    scratch: int


Products = Callable[[Product, int], None]  # compute a product so many times
Clock = Callable[[], float]


def _multiply(p: Product, packed: int, times: int) -> None:
    compiled.load_extra("matmul", lambda name, done, of: None)
    for _ in range(times):
        compiled.matmul(
            p.fmt.id, p.w, COLUMNS, 0, p.rows // GROUP, p.x, STRIDE, packed, p.tokens, p.out, 4 * p.rows, p.scratch
        )


def by_tiles(p: Product, times: int) -> None:
    """The product with AMX tiles."""
    _multiply(p, p.packed, times)


def by_dots(p: Product, times: int) -> None:
    """The product with VNNI."""
    _multiply(p, 0, times)


@njit(**JIT)
def _records(values, tokens, to, packed):
    quantize_rows(address(values), 4 * COLUMNS, COLUMNS, to, STRIDE, 0, tokens)
    pack_rows(to, STRIDE, COLUMNS, packed, tokens)


def _aligned(nbytes: int) -> tuple[np.ndarray, int]:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes], raw.ctypes.data + start


def _matrix(fmt: QuantizedFormat, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Random codes, scales and minimums, all finite, as formats/description.py draws them."""
    units = rows // GROUP * COLUMNS // fmt.unit
    buffer, at = _aligned(units * fmt.unit_bytes)
    buffer[:] = rng.integers(0, 256, buffer.size, np.uint8)
    scales, matrix = fmt.scales, buffer.reshape(units, fmt.unit_bytes)
    blocks = matrix[:, scales.head_bytes :].reshape(units, fmt.blocks, fmt.block_bytes)
    if scales.is_sub:
        f16 = matrix[:, : scales.head_bytes]
    elif scales.sub == "e8m0":
        blocks[..., fmt.codes.nbytes :] = rng.integers(120, 130, (units, fmt.blocks, GROUP), np.uint8)
        return buffer, at
    else:
        f16 = blocks[..., fmt.codes.nbytes :]
    f16[...] = rng.normal(size=(*f16.shape[:-1], f16.shape[-1] // 2)).astype(np.float16).view(np.uint8)
    return buffer, at


def speedup(tiles: Callable[[], None], dots: Callable[[], None], rounds: int, clock: Clock) -> float:
    """Time of `dots` / time of `tiles`: the median over rounds, each of which runs both one after the other.

    The first AGREEING rounds decide if they agree.
    """
    ratios = list[float]()
    while len(ratios) < rounds:
        begun = clock()
        tiles()
        between = clock()
        dots()
        ratios.append((clock() - between) / (between - begun))
        if len(ratios) == AGREEING and len({ratio > 1 for ratio in ratios}) == 1:
            break
    return float(np.median(ratios))


def compare(
    rounds: int = ROUNDS,
    rows: int = ROWS,
    tiles: Products = by_tiles,
    dots: Products = by_dots,
    clock: Clock = time.perf_counter,
) -> tuple[bool, dict[str, list[float]]]:
    """Whether all bytes are equal, and by format how many times as fast the tiles are at each of PROBED_TOKENS."""
    rng = np.random.default_rng(1)
    most = max(PROBED_TOKENS)
    values = rng.normal(size=(most, COLUMNS)).astype(np.float32)
    values[1], values[2, :32] = 0, np.inf
    records, x = _aligned(most * STRIDE)
    packed, packed_at = _aligned(packed_bytes(most, COLUMNS))
    _records(values, most, x, packed_at)
    scratch, scratch_at = _aligned(MATMUL_BYTES)
    (tiled, tiled_at), (dotted, dotted_at) = (_aligned(most * 4 * rows) for _ in range(2))
    same, speedups = True, dict[str, list[float]]()
    for fmt in QUANTIZED:
        matrix, w = _matrix(fmt, rows, rng)
        found = speedups[fmt.name] = []
        for tokens in PROBED_TOKENS:
            tiled[:], dotted[:] = 0x55, 0xAA  # what one of them does not write is not equal
            product = Product(fmt, rows, tokens, w, x, packed_at, tiled_at, scratch_at)
            other = product._replace(out=dotted_at)
            tiles(product, 1)
            dots(other, 1)
            n = tokens * 4 * rows
            same = same and tiled[:n].tobytes() == dotted[:n].tobytes()
            times = max(1, REPEATED // tokens)
            found.append(speedup(partial(tiles, product, times), partial(dots, other, times), rounds, clock))
        del matrix
    del records, packed, scratch
    return same, speedups


def main() -> None:
    """Print the verdict."""
    rounds, rows = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (ROUNDS, ROWS)
    same, speedups = compare(rounds, rows)
    verdict = Verdict(speedups, "") if same else Verdict({}, "its tiles do not give the bytes that VNNI gives")
    print(json.dumps(verdict._asdict()))


if __name__ == "__main__":
    main()
