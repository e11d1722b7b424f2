"""Follows in a predicted text what of it has been generated.

A client that knows most of an answer beforehand sends it as `prediction`.  `PredictionFollower` takes the output's
tokens one after the other and says which token of the prediction should come next.  Where the output differs, it
first assumes that one token was replaced by another; if that is wrong, too, it looks for the last two tokens of the
output in the prediction, nearest to the place where it was lost.

The scheduler proposes draft tokens from it, the gateway counts how many tokens of the prediction came true.  Both are
functions of the two sequences of tokens alone, so no count depends on steps, batches or restarts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

SEARCHED = 2048  # tokens of the prediction that are searched before and behind the place
MAX_TRIES = 16  # matches of bytes that do not begin at a token; more than a few occur only in constructed texts
_UNKNOWN = -1


class PredictionFollower:
    """One for each output. O(1) for each token."""

    __slots__ = ("_anchor", "_bytes", "_is_guess", "_last", "_matched", "accepted", "at", "n_seen", "tokens")

    def __init__(self, prediction: bytes) -> None:
        """`prediction`: token ids, i32 little-endian."""
        self.tokens = memoryview(prediction).cast("i")
        self.at = 0  # position in the prediction of the token that comes next; len(tokens) or more: none is known
        self.accepted = 0  # tokens of the prediction that came when they were expected
        self.n_seen = 0  # tokens of the output
        self._bytes = prediction
        self._matched = bytearray(len(self.tokens))  # 1: counted in `accepted`
        self._anchor = 0  # position after the last token that came when it was expected
        self._is_guess = False  # `at` assumes that one token was replaced
        self._last = _UNKNOWN

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that did not come."""
        return len(self.tokens) - self.accepted

    def expected(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens that come next, if the output goes on as predicted."""
        return tuple(self.tokens[self.at : self.at + most])

    def follow(self, tokens: Sequence[int], first: int, n_outputs: int) -> None:
        """Take those of the first `n_outputs` tokens of the output that are new; it begins at `tokens[first]`."""
        for index in range(first + self.n_seen, first + n_outputs):
            self._push(tokens[index])
        self.n_seen = max(self.n_seen, n_outputs)

    def _push(self, token: int) -> None:
        tokens, at = self.tokens, self.at
        if at < len(tokens) and tokens[at] == token:
            if not self._matched[at]:
                self._matched[at] = 1
                self.accepted += 1
            self.at = self._anchor = at + 1
            self._is_guess = False
        else:
            found = self._find(token) if self._last != _UNKNOWN else _UNKNOWN
            if found == _UNKNOWN and at == self._anchor and not self._is_guess:
                found, self._is_guess = at + 1, True
            else:
                self._is_guess = False
            self.at = len(tokens) if found == _UNKNOWN else found
        self._last = token

    def _find(self, token: int) -> int:
        """The position after the nearest occurrence of the last token and this one."""
        needle = array("i", (self._last, token)).tobytes()
        data, middle = self._bytes, 4 * self._anchor
        begin, end = middle, middle + 4 * SEARCHED
        for _ in range(MAX_TRIES):
            found = data.find(needle, begin, end)
            if found < 0:
                break
            if found % 4 == 0:
                return found // 4 + 2
            begin = found + 1
        begin, end = max(0, middle - 4 * SEARCHED), middle
        for _ in range(MAX_TRIES):
            found = data.rfind(needle, begin, end)
            if found < 0:
                break
            if found % 4 == 0:
                return found // 4 + 2
            end = found + len(needle) - 1
        return _UNKNOWN
