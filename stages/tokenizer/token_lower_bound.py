"""A lower bound of a text's token count, computed from its bytes alone.

Each byte of a text is in one token, and that token is no longer than the longest token that contains this byte.  With
1 divided by that length as the byte's weight, no token weighs more than 1, so a text has at least as many tokens as it
weighs.  Bytes that are in no token weigh nothing: encoding drops them (`Vocabulary.holes`).  The bound takes a few ms
per MB.  It identifies prose that is far too long without encoding it, because letters occur only in tokens of at most
some tens of bytes.  Independent of merges.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

ONE = 1 << 32  # the weight of a token; the weights of bytes are rounded down, so that a sum is never too large
_SLICE = 1 << 16  # characters counted at once: `bincount` takes 8 bytes for each


class TokenLowerBound:
    """Weighs texts for one vocabulary. `tokens`: the bytes of each token that encoding can produce."""

    def __init__(self, tokens: Sequence[bytes], holes: Collection[int] = ()) -> None:
        lengths = np.array([len(token) for token in tokens], np.int64)
        longest = np.zeros(256, np.int64)  # bytes of the longest token with that byte
        np.maximum.at(longest, np.frombuffer(b"".join(tokens), np.uint8), np.repeat(lengths, lengths))
        longest[list(holes)] = 0
        self._weights = np.where(longest > 0, ONE // np.maximum(longest, 1), 0)

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
