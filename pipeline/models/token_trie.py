"""A trie of the texts of tokens in arrays, which can be mapped from a file: finds all tokens of many texts at once.

    keys     u64 (nodes,)   the node before << 32 | the character, in order; node 0 is the root, entry `i` node `i + 1`
    slots    i32            places of the keys (`key_table.py`)
    tokens   i32 (nodes,)   of each entry, the token that ends there; -1: none

A search goes from all places of a text one character further at a time, as far as any token reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.models.key_table import KeyTable, make_slots

END = 0xFFFFFFFF  # a code point of no character: between texts, and behind the last
Ints = NDArray[np.int64]


class TokenTrie:
    """Finds tokens. Read-only."""

    def __init__(self, keys: NDArray[np.uint64], slots: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Raises `ValueError` for arrays that do not fit."""
        if len(keys) != len(tokens):
            raise ValueError(f"{len(keys)} nodes have {len(tokens)} tokens")
        if tokens.dtype != np.int32:  # machine code reads them without looking
            raise ValueError(f"tokens are {tokens.dtype}, expected int32")
        self._children, self._tokens = KeyTable(keys, slots), tokens

    @property
    def arrays(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """The key and the token of each entry: for searches in machine code."""
        return self._children.arrays[0], self._tokens

    def matches(self, codes: NDArray[np.uint64]) -> Iterator[tuple[Ints, int, Ints]]:
        """Yield the tokens of a text by their length: where they begin, the length in characters, and their ids.

        codes: the text's code points, with `END` behind it; tokens do not cross an `END`.
        """
        places, length = np.arange(len(codes)), 0
        nodes = np.zeros(len(codes), np.uint64)
        while len(places):
            children = self._children.find(nodes << np.uint64(32) | codes[places + length])
            exists = children >= 0
            places, children = places[exists], children[exists]
            length += 1
            tokens = self._tokens[children]
            is_token = tokens >= 0
            yield places[is_token], length, tokens[is_token].astype(np.int64)
            nodes = (children + 1).astype(np.uint64)


def make_trie(ids: Mapping[str, int]) -> tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.int32]]:
    """Return keys, slots and tokens for texts, none of them empty, and their tokens."""
    codes = np.frombuffer("".join(ids).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    tokens = np.fromiter(ids.values(), np.int32, len(ids))
    begins = np.cumsum(lengths) - lengths
    nodes = np.zeros(len(ids), np.uint64)  # where the beginning of each text has led
    keys: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
    found: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    n_nodes, length = 1, 0
    while len(begins):
        level, which = np.unique(nodes << np.uint64(32) | codes[begins + length], return_inverse=True)
        length += 1
        ends = np.full(len(level), -1, np.int32)
        is_end = lengths == length
        ends[which[is_end]] = tokens[is_end]
        keys.append(level)
        found.append(ends)
        goes_on = ~is_end
        nodes = (which[goes_on] + n_nodes).astype(np.uint64)
        n_nodes += len(level)
        begins, lengths, tokens = begins[goes_on], lengths[goes_on], tokens[goes_on]
    all_keys = np.concatenate(keys)
    return all_keys, make_slots(all_keys), np.concatenate(found)
