"""Packs rows by moving bits: as `layout.pack` does, at the speed of NumPy's operations on whole words.

Every bit of a packed unit is a bit of one of its 16 rows, or its complement, or a constant.  Which one it is follows
from packing a few patterns with the definition in layout.py, so a new format needs nothing here.  The result is a list
of moves: 16 lanes (rows) of words are shifted, masked, and combined into the words of the unit.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from stages.worker.checkpoint.layout import pack
from stages.worker.kernels.formats import FORMATS, GROUP, Format

_WORDS: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 2: np.dtype("<u2"), 1: np.dtype("u1")}
_WORDS_AT_ONCE = 8  # of a move
PAD = 4  # zero bytes on both sides of a row's unit, so that every move reads whole words


class _Move(NamedTuple):
    """Words of the unit `to` |= (words of the rows at byte `source` << `left` or >> `right`) & `mask`."""

    to: np.ndarray
    source: np.ndarray
    left: int
    right: int
    mask: int


@dataclass(frozen=True)
class _Part:
    """The words of one width: their bytes in the unit, and how they are made."""

    word: np.dtype[Any]
    places: tuple[tuple[int, int, int], ...]  # (first word, number of words, first byte in the unit) of each run
    inverted: np.ndarray  # what the words are combined with at the end
    moves: tuple[_Move, ...]
    offsets: np.ndarray  # bytes of a row's unit at which the moves' words are


class NoProgram(ValueError):
    """The format does more than move bits."""


class BitProgram:
    """How a quantized format is packed."""

    def __init__(self, fmt: Format, define: Callable[[np.ndarray], np.ndarray]) -> None:
        """`define`: (16 n, source_bytes) u8 to (n, unit_bytes) u8. Raises `NoProgram`."""
        self._fmt = fmt
        source, constant = _sources(fmt, define)
        self.parts = tuple(_parts(source, constant, fmt.source_bytes))
        probe = np.random.default_rng(0).integers(0, 256, (GROUP * 8, fmt.source_bytes), np.uint8)
        if not np.array_equal(self.pack(probe).reshape(8, -1), define(probe)):
            raise NoProgram(f"{fmt.name}: random rows are packed differently")

    def pack(self, rows: np.ndarray) -> np.ndarray:
        """(16 n, units * source_bytes) u8 to (n, units * unit_bytes) u8."""
        size = self._fmt.source_bytes
        groups, units = rows.shape[0] // GROUP, rows.shape[1] // size
        buffers = Buffers()
        padded = pad_rows(rows, buffers)
        out = np.empty((groups, units, self._fmt.unit_bytes), np.uint8)
        # Of every word, its 16 rows are neighbours in memory: (word, group, unit, row).
        lanes, strides = (groups, units, GROUP), (GROUP * units * size, size, units * size)
        for part in self.parts:
            words = buffers.take((len(part.offsets), *lanes), part.word)
            for i, offset in enumerate(part.offsets.tolist()):
                words[i] = np.ndarray(lanes, part.word, padded.data, PAD + offset, strides)
            made = buffers.take((len(part.inverted), *lanes), part.word)
            made[:] = part.inverted[:, None, None, None]
            for move in part.moves:
                _apply(move, words, made, buffers)
            for first, count, byte in part.places:
                view = out[:, :, byte : byte + count * GROUP * part.word.itemsize].view(part.word)
                view.reshape(groups, units, count, GROUP)[...] = made[first : first + count].transpose(1, 2, 0, 3)
        return out.reshape(groups, -1)


def _apply(move: _Move, words: np.ndarray, made: np.ndarray, buffers: Buffers) -> None:
    kind = words.dtype.type
    for first in range(0, len(move.to), _WORDS_AT_ONCE):
        to, source = move.to[first : first + _WORDS_AT_ONCE], move.source[first : first + _WORDS_AT_ONCE]
        with buffers.mark():
            moved = buffers.take((len(to), *words.shape[1:]), words.dtype)
            np.take(words, source, axis=0, out=moved, mode="clip")
            if move.left:
                moved <<= kind(move.left)
            if move.right:
                moved >>= kind(move.right)
            moved &= kind(move.mask)
            for i, word in enumerate(to.tolist()):
                made[word] ^= moved[i]


class Buffers:
    """Memory of this thread that is used again: a fresh array would be mapped anew each time."""

    _own = threading.local()

    def __init__(self) -> None:
        self._at = 0

    def take(self, shape: tuple[int, ...], word: np.dtype[Any]) -> np.ndarray:
        """An array with any contents, valid until the next `pack`."""
        nbytes = math.prod(shape) * word.itemsize
        begin = self._at
        self._at += -(-nbytes // 64) * 64
        memory = getattr(self._own, "memory", None)
        if memory is None or len(memory) < self._at:
            memory = self._own.memory = np.empty(2 * self._at, np.uint8)  # arrays taken before keep theirs
        return memory[begin : begin + nbytes].view(word).reshape(shape)

    @contextmanager
    def mark(self) -> Iterator[None]:
        """Give back what is taken within."""
        at = self._at
        yield
        self._at = at


def _sources(fmt: Format, define: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """For each bit of a unit: the bit of the 16 rows that it follows (-1: none), and its value when all are 0."""
    n = GROUP * fmt.source_bytes * 8
    numbers = np.arange(n)
    patterns = [numbers * 0, numbers * 0 + 1, *(numbers >> bit & 1 for bit in range(n.bit_length()))]
    rows = np.packbits(np.array(patterns, np.uint8), axis=1, bitorder="little").reshape(-1, fmt.source_bytes)
    packed = np.unpackbits(define(rows), axis=1, bitorder="little")
    changed = packed ^ packed[0]
    source = sum(changed[2 + bit].astype(np.int64) << bit for bit in range(n.bit_length()))
    return np.where(changed[1], source, -1), packed[0]


def _parts(source: np.ndarray, constant: np.ndarray, size: int) -> list[_Part]:
    row = np.where(source >= 0, source // (8 * size), -1)
    row_of_byte = row.reshape(-1, 8).max(axis=1)
    if (row_of_byte < 0).any():
        raise NoProgram("a byte that follows no row")
    found: dict[int, list[int]] = defaultdict(list)  # width: first bytes of the runs of 16 rows' words
    at = 0
    while at < len(row_of_byte):
        width = next((w for w in _WORDS if _is_run(row_of_byte[at : at + GROUP * w], w)), 0)
        if not width:
            raise NoProgram("rows that do not alternate")
        found[width].append(at)
        at += GROUP * width
    return [_part(width, places, source, constant, size) for width, places in found.items()]


def _is_run(rows: np.ndarray, width: int) -> bool:
    return np.array_equal(rows, np.repeat(np.arange(GROUP), width))


def _part(width: int, places: list[int], source: np.ndarray, constant: np.ndarray, size: int) -> _Part:
    bits = 8 * width
    moves: dict[tuple[int, int, int], int] = defaultdict(int)  # (word, offset, shift to the left): mask
    inverted = np.zeros(len(places), np.int64)
    for word, byte in enumerate(places):
        for bit in range(bits):
            inverted[word] |= int(constant[8 * byte + bit]) << bit
            one = int(source[8 * byte + bit])
            if one < 0:
                continue
            offset = one // 8 - bit // 8
            if width == 1 or not -PAD <= offset <= size + PAD - width:
                offset = min(max(offset, 0), size - width)
            moves[word, offset, bit - (one - 8 * offset)] |= 1 << bit
    offsets = sorted({offset for _, offset, _ in moves})
    # Moves of the same shift and mask are one, as long as no word is in it twice.
    grouped: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for (word, offset, shift), mask in moves.items():
        turn = 0
        while any(one == word for one, _ in grouped[shift, mask, turn]):
            turn += 1
        grouped[shift, mask, turn].append((word, offsets.index(offset)))
    return _Part(
        _WORDS[width],
        tuple(_runs(places, width)),
        inverted.astype(_WORDS[width]),
        tuple(
            _Move(np.array([w for w, _ in pairs]), np.array([o for _, o in pairs]), max(shift, 0), max(-shift, 0), mask)
            for (shift, mask, _), pairs in grouped.items()
            if pairs
        ),
        np.array(offsets),
    )


def _runs(places: list[int], width: int) -> list[tuple[int, int, int]]:
    """Words that lie one after the other in the unit."""
    runs: list[tuple[int, int, int]] = []
    for word, byte in enumerate(places):
        if runs and byte == runs[-1][2] + runs[-1][1] * GROUP * width:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
        else:
            runs.append((word, 1, byte))
    return runs


def pad_rows(rows: np.ndarray, buffers: Buffers) -> np.ndarray:
    """The bytes of rows with `PAD` zeros before and behind them: (bytes + 2 `PAD`,) u8."""
    padded = buffers.take((rows.size + 2 * PAD,), _WORDS[1])
    padded[:PAD] = padded[-PAD:] = 0
    padded[PAD:-PAD].reshape(rows.shape)[...] = rows
    return padded


@cache
def program_of(name: str) -> BitProgram | None:
    """The program of a format; None if it does more than move bits, or is dense."""
    fmt = FORMATS[name]
    if fmt.dense:
        return None
    try:
        return BitProgram(fmt, lambda rows: np.concatenate(list(pack(rows, fmt))))
    except NoProgram:
        return None


def whole_groups(rows: np.ndarray) -> np.ndarray:
    """Rows (n, row_bytes) u8, and rows of zeros up to a multiple of 16."""
    short = -rows.shape[0] % GROUP
    return np.concatenate([rows, np.zeros((short, rows.shape[1]), np.uint8)]) if short else rows


def pack_rows(rows: np.ndarray, fmt: Format) -> list[np.ndarray]:
    """Rows of GGUF bytes (rows, row_bytes) u8 to the pieces that `layout.pack` gives, joined as they are."""
    rows = whole_groups(rows)
    if fmt.dense:
        values = np.ascontiguousarray(rows).view(_WORDS[fmt.source_bytes])
        by_row = values.reshape(rows.shape[0] // GROUP, GROUP, -1)
        return [np.ascontiguousarray(by_row.transpose(0, 2, 1)).view(np.uint8).reshape(by_row.shape[0], -1)]
    program = program_of(fmt.name)
    return list(pack(rows, fmt)) if program is None else [program.pack(rows)]
