"""What the tokens of a vocabulary read like, as the tokenizer has described it: a copy that outlives it.

A few hundred KB for each vocabulary, one for all versions of a model that share it.
"""

from __future__ import annotations

from array import array

from pipeline.protocol.messages import Described


class TokenBytes:
    """Empty, and false, until `fill`. `is_used`: requests have been answered with it."""

    __slots__ = ("_data", "_ends", "control", "is_used")

    def __init__(self) -> None:
        self._data = b""
        self._ends = array("I")  # ids count from 0: a token begins where the one before it ends
        self.is_used = False
        self.control: frozenset[int] = frozenset()  # ids that are no text unless asked for

    def __bool__(self) -> bool:
        return bool(self._ends)

    def fill(self, described: Described) -> None:
        """Raises `ValueError` for what is no table."""
        ends, control = array("I"), array("i")
        ends.frombytes(described.piece_ends)
        control.frombytes(described.control)
        if len(ends) != described.vocab_size or (ends and ends[-1] != len(described.pieces)):
            raise ValueError(f"{len(ends)} pieces in {len(described.pieces)} bytes for {described.vocab_size} tokens")
        self._data, self._ends, self.control = described.pieces, ends, frozenset(control)

    def shown(self, token: int, skip_special: bool) -> bytes:
        """What of the token is text."""
        return b"" if skip_special and token in self.control else self.get(token)

    def get(self, token: int) -> bytes:
        """The token's bytes; a special token's are its name. Ids outside the vocabulary have none."""
        ends = self._ends
        if not 0 <= token < len(ends):
            return b""
        return self._data[ends[token - 1] if token else 0 : ends[token]]
