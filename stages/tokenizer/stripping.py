"""White space that belongs to special tokens beside it: it is in no other token, and no text of its own is left of it.

llama.cpp drops the ASCII white space after a token with `RSTRIP`, `tokenizers` all of Unicode's (`rstrip`, `lstrip`).
"""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

_ASCII = " \t\n\v\f\r"  # C's isspace
# The property White_Space of Unicode.
_UNICODE = _ASCII + "\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


class Stripping:
    """Which tokens take white space. False if there are none.

    right, left: ids of the tokens that take what is behind them, and before them.  is_unicode: it is Unicode's white
    space, not ASCII's alone.
    """

    def __init__(self, right: Collection[int] = (), left: Collection[int] = (), is_unicode: bool = False) -> None:
        self._right, self._left = frozenset(right), frozenset(left)
        self._characters = _UNICODE if is_unicode else _ASCII
        self._run = re.compile(f"[{self._characters}]*")

    def __bool__(self) -> bool:
        return bool(self._right or self._left)

    @property
    def is_left(self) -> bool:
        """Whether a token takes what is before it."""
        return bool(self._left)

    def widened(self, text: str, least: int, name: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return a name (begin, end, id) with its white space, of which none is before `least`."""
        begin, end, token = name
        if token in self._left:
            while begin > least and text[begin - 1] in self._characters:
                begin -= 1
        if token in self._right:
            end = self._behind(text, end)
        return begin, end, token

    def window_end(self, text: str, end: int) -> int:
        """Return where a window of a text may end that was to end at `end`: not within or behind white space.

        A name behind that white space could take it.  One that begins at the window's last character is found with it.
        """
        if not self._left or end >= len(text) or text[end - 1] not in self._characters:
            return end
        return min(self._behind(text, end) + 1, len(text))

    def _behind(self, text: str, at: int) -> int:
        found = self._run.match(text, at)
        return found.end() if found is not None else at

    def weights(self, weights: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what bytes weigh in a lower bound of a text's tokens: nothing if they may be of taken white space."""
        if not self:
            return weights
        left = weights.copy()
        left[list(self._characters.encode())] = 0
        return left
