"""Places in a text that no token crosses: their two characters are neighbours in no token."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.models.key_table import KeyTable
from pipeline.models.vocabularies import SPACE

_ASCII = 0x80
_OTHER = 0x81  # `SPACE` is 0x80
Bools = NDArray[np.bool_]


class Borders:
    """`neighbours`: the pairs of characters in tokens, one << 32 | other."""

    def __init__(self, neighbours: KeyTable) -> None:
        self._neighbours = neighbours

    @cached_property
    def _common(self) -> Bools:
        """Of two characters that are ASCII or spaces, one << 8 | other: whether there is a border between them."""
        codes = np.append(np.arange(_ASCII, dtype=np.uint64), np.uint64(ord(SPACE)))
        found = np.zeros((1 << 8, 1 << 8), bool)
        pairs = (codes[:, None] << np.uint64(32) | codes[None, :]).ravel()
        found[: len(codes), : len(codes)] = (self._neighbours.find(pairs) < 0).reshape(len(codes), -1)
        return found.ravel()

    def find(self, text: str) -> Bools:
        """Return for each place between two characters of a text whether it is a border."""
        return self.find_codes(np.frombuffer(text.encode("utf-32-le"), "<u4"))

    def find_codes(self, codes: NDArray[np.uint32]) -> Bools:
        """As `find`, for the code points of a text."""
        small = np.minimum(codes, _OTHER).astype(np.uint16)
        small[codes == ord(SPACE)] = _OTHER - 1
        small[codes == _OTHER - 1] = _OTHER
        found = self._common[small[:-1] << np.uint16(8) | small[1:]]
        is_other = small == _OTHER
        others = np.flatnonzero(is_other[:-1] | is_other[1:])
        if len(others):
            pairs = codes[others].astype(np.uint64) << np.uint64(32) | codes[others + 1]
            found[others] = self._neighbours.find(pairs) < 0
        return found
