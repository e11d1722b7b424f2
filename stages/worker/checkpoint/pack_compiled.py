"""The moves of bit_program.py in a compiled kernel: the same bytes, several times as fast, on any number of threads.

Compiling takes a moment, once for a machine: the kernel is stored with the others (kernels/stored_code.py), and used
where it is stored already or where there is enough to pack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from pipeline.models.store import Progress
from stages.worker.checkpoint.bit_program import (
    PAD,
    Buffers,
    pack_rows,
    pad_rows,
    program_of,
    whole_groups,
)
from stages.worker.checkpoint.conversion_kernel import is_loaded
from stages.worker.kernels import compiled
from stages.worker.kernels.formats import GROUP, Format

NAME = "pack_units"
WORTH_BYTES = 256 << 20  # of weights: NumPy's operations take a second for them, and the compiler about as long
Packer = Callable[[np.ndarray, Format], list[np.ndarray]]


def choose_packer(weights_bytes: int, progress: Progress) -> Packer:
    """What packs so many bytes of weights. Compiles the kernel if that is worth it."""
    return pack_rows_compiled if is_loaded(NAME, weights_bytes >= WORTH_BYTES, progress) else pack_rows


def pack_rows_compiled(rows: np.ndarray, fmt: Format) -> list[np.ndarray]:
    """As `bit_program.pack_rows`. Call `choose_packer` first."""
    program = None if fmt.dense else program_of(fmt.name)
    if program is None:
        return pack_rows(rows, fmt)
    return [_pack(whole_groups(rows), fmt, *_table(fmt.name))]


def _pack(rows: np.ndarray, fmt: Format, table: np.ndarray, vectors: int) -> np.ndarray:
    groups, units = rows.shape[0] // GROUP, rows.shape[1] // fmt.source_bytes
    buffers = Buffers()
    padded = pad_rows(rows, buffers)
    out = np.empty((groups, units * fmt.unit_bytes), np.uint8)
    scratch = buffers.take((16 * vectors,), np.dtype(np.int32))
    compiled.pack_units(
        table.ctypes.data,
        padded.ctypes.data + PAD,
        groups,
        units,
        fmt.source_bytes,
        out.ctypes.data,
        fmt.unit_bytes,
        scratch.ctypes.data,
    )
    return out


@cache
def _table(name: str) -> tuple[np.ndarray, int]:
    """The program of a format as kernels/pack_units.py reads it, and the vectors of scratch that it needs."""
    program = program_of(name)
    assert program is not None
    table = [len(program.parts)]
    for part in program.parts:
        width, offsets, words = part.word.itemsize, part.offsets.tolist(), part.inverted.tolist()
        moves = [
            (64 * (len(offsets) + to), 64 * source, move.left, move.right, move.mask)
            for move in part.moves
            for to, source in zip(move.to.tolist(), move.source.tolist(), strict=True)
        ]
        table += [width, len(offsets), len(words), len(moves), *offsets]
        for first, count, byte in part.places:
            for i in range(count):
                table += [byte + i * GROUP * width, words[first + i]]
        for one in moves:
            table += one
    vectors = max(len(part.offsets) + len(part.inverted) for part in program.parts)
    return np.array(table, np.int64), vectors
