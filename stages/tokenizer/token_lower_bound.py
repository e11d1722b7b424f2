"""A lower bound of a text's token count, computed from its bytes alone.

Each byte of a text is in one token, and that token is no longer than the longest token that contains this byte.  With
1 divided by that length as the byte's weight, no token weighs more than 1, so a text has at least as many tokens as it
weighs.  Bytes that are in no token weigh nothing: encoding drops them (`Vocabulary.holes`).  The bound takes a few ms
per MB.  It identifies prose that is far too long without encoding it, because letters occur only in tokens of at most
some tens of bytes.  Independent of merges.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.models.vocabulary_tables import ONE

_SLICE = 1 << 16  # characters counted at once: `bincount` takes 8 bytes for each


class TokenLowerBound:
    """Weighs texts for one vocabulary. `weights`: of each byte (`vocabulary_tables.byte_weights`)."""

    def __init__(self, weights: NDArray[np.int64]) -> None:
        self._weights = weights

    def weight(self, text: str) -> int:
        """Return the weight of `text`, which has no lone surrogates, in units of 1 / `ONE` tokens.

        The weights of a text's parts add up to its weight.
        """
        counts = np.zeros(256, np.int64)
        for at in range(0, len(text), _SLICE):
            data = text[at : at + _SLICE].encode()
            counts += np.bincount(np.frombuffer(data, np.uint8), minlength=256)
        return int(counts @ self._weights)


def min_tokens(weight: int) -> int:
    """Return the least number of tokens of a text with that weight."""
    return -(-weight // ONE)
