"""Fills a KV cache of llama.cpp with positions that are not computed: to compute 130,000 of them takes hours.

    a block is computed in sequence 0 --its state--> bytes --other positions--> sequence 1 --cells--> sequence 0

The state of a sequence has a record of each cell (position, number of sequences, sequence), then K and V of each layer.
A block is restored again and again with the positions behind the last one, and its cells are given to sequence 0.  So
each cell belongs to the sequence that is measured, and attention reads it; what the values are takes no time.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_CELL = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("sequence", "<i4")])
_MEASURED, _RESTORED = 0, 1  # sequences of a context
_END = -1  # as a position: all behind the first one


class SequenceState:
    """The bytes of a sequence's cells at the consecutive positions from `first` on."""

    def __init__(self, raw: Any, sequence: int, first: int, n: int) -> None:
        """`raw`: array of c_uint8. Raises `RuntimeError` unless it has one record of each of the `n` cells."""
        self.raw = raw
        self.n = n
        cells = np.empty(n, _CELL)
        cells["position"], cells["n_sequences"], cells["sequence"] = np.arange(first, first + n), 1, sequence
        data, expected = bytes(raw), cells.tobytes()
        at = data.find(expected)
        if at < 0 or data.find(expected, at + 1) >= 0:
            raise RuntimeError(
                f"the state of {n} positions from {first} on has no or several records of them in its {len(data):,} "
                f"bytes: this release of llama.cpp or this architecture has another layout"
            )
        self._cells = np.frombuffer(raw, np.uint8)[at : at + len(expected)].view(_CELL)

    def move(self, first: int) -> None:
        """Give the cells the positions from `first` on."""
        self._cells["position"] = np.arange(first, first + self.n)


class CacheFiller:
    """The cells of sequence 0 of a context with a unified cache and at least two sequences."""

    def __init__(self, library: Any, context: Any) -> None:
        """`library`: llama.cpp's functions."""
        self._lib = library
        self._context = context
        self._memory = library.llama_get_memory(context)

    def state(self, first: int, n: int) -> SequenceState:
        """The state of `n` computed positions of sequence 0."""
        lib, memory = self._lib, self._memory
        lib.llama_memory_seq_cp(memory, _MEASURED, _RESTORED, first, first + n)
        size = lib.llama_state_seq_get_size(self._context, _RESTORED)
        raw = (ctypes.c_uint8 * size)()
        written = lib.llama_state_seq_get_data(self._context, raw, size, _RESTORED)
        lib.llama_memory_seq_rm(memory, _RESTORED, _END, _END)
        if written != size:
            raise RuntimeError(f"llama_state_seq_get_data wrote {written:,} of {size:,} bytes")
        return SequenceState(raw, _RESTORED, first, n)

    def append(self, state: SequenceState, first: int) -> None:
        """Restore a state at the positions from `first` on, as cells of sequence 0."""
        state.move(first)
        lib, memory = self._lib, self._memory
        read = lib.llama_state_seq_set_data(self._context, state.raw, len(state.raw), _RESTORED)
        if read != len(state.raw):
            raise RuntimeError(f"llama_state_seq_set_data read {read:,} of {len(state.raw):,} bytes at {first}")
        lib.llama_memory_seq_cp(memory, _RESTORED, _MEASURED, _END, _END)
        lib.llama_memory_seq_rm(memory, _RESTORED, _END, _END)

    def fill(self, state: SequenceState, first: int, n: int) -> None:
        """Append a state from position `first` on until there are `n` positions. `n` + the state's must fit."""
        for at in range(first, n, state.n):
            self.append(state, at)
        self.cut(n)

    def cut(self, n: int) -> None:
        """Remove the positions from `n` on. Raises `RuntimeError` unless 0 to n - 1 remain."""
        lib, memory = self._lib, self._memory
        lib.llama_memory_seq_rm(memory, _MEASURED, n, _END)
        ends = tuple(f(memory, _MEASURED) for f in (lib.llama_memory_seq_pos_min, lib.llama_memory_seq_pos_max))
        if ends != (0, n - 1):
            raise RuntimeError(f"the cache has positions {ends[0]} to {ends[1]}, expected 0 to {n - 1}")
