"""How many tokens a text has at least, told from its bytes alone.

Each byte of a text is in one token, and a token with that byte is no longer than the longest one that has it.
So with 1 / that length as the byte's weight no token weighs more than 1, and a text has no fewer tokens than it
weighs.  Bytes that no token is made of weigh nothing: they are lost (`Vocabulary.holes`).  It costs a few ms for
each MB, and prose, whose letters are in no token of more than some tens of bytes, is told from it to be too long
long before its tokens are.  Knows nothing of merges.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

ONE = 1 << 32  # units of weight; each byte's is rounded down, so that sums are never too large
_SLICE = 1 << 16  # characters counted at once: `bincount` takes 8 bytes for each


class Fewest:
    """`tokens`: the bytes of each token that a text can become."""

    def __init__(self, tokens: Sequence[bytes], holes: Collection[int] = ()) -> None:
        lengths = np.array([len(token) for token in tokens], np.int64)
        longest = np.zeros(256, np.int64)  # token with that byte
        np.maximum.at(longest, np.frombuffer(b"".join(tokens), np.uint8), np.repeat(lengths, lengths))
        longest[list(holes)] = 0
        self._weights = np.where(longest > 0, ONE // np.maximum(longest, 1), 0)

    def weigh(self, text: str) -> int:
        """Units of all bytes of `text`, which has no lone surrogates. Weights of pieces add up to the whole's."""
        counts = np.zeros(256, np.int64)
        for at in range(0, len(text), _SLICE):
            data = text[at : at + _SLICE].encode()
            counts += np.bincount(np.frombuffer(data, np.uint8), minlength=256)
        return int(counts @ self._weights)


def at_least(units: int) -> int:
    """Tokens of a text that weighs that much."""
    return -(-units // ONE)
