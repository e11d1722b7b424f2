"""The bytes of each token of a vocabulary: the gateway's own copy, so that streams do not need the tokenizer.

A few hundred KB for each vocabulary; versions of a model that have the same tokenizer share one table.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from pipeline.protocol.messages import Described, ModelVocabulary
from stages.gateway.requests.sequence_breakers import BreakerSet, find_breakers

MAX_BREAKER_SETS = 64  # remembered; each has a bit for every token


class TokenBytes:
    """Bytes by token id. Empty, and false, until `fill`. `is_used`: requests have been answered with it."""

    __slots__ = ("_breakers", "_data", "_ends", "control", "eos_ids", "is_used")

    def __init__(self) -> None:
        self._data = b""
        self._breakers: dict[tuple[str, ...], BreakerSet] = {}  # least recently used first
        self._ends = array("I")  # end offset of each token in `_data`; it begins where the token before it ends
        self.is_used = False
        self.control: frozenset[int] = frozenset()  # ids that are not text unless the client asks for them
        self.eos_ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def fill(self, described: Described) -> None:
        """Take the table from the tokenizer's description. Raises `ValueError` if it is inconsistent."""
        ends, control = array("I"), array("i")
        ends.frombytes(described.piece_ends)
        control.frombytes(described.control)
        if len(ends) != described.vocab_size or (ends and ends[-1] != len(described.pieces)):
            raise ValueError(f"{len(ends)} tokens in {len(described.pieces)} bytes, expected {described.vocab_size}")
        self._data, self._ends, self.control = described.pieces, ends, frozenset(control)
        self.eos_ids = described.eos_ids

    def breakers(self, texts: tuple[str, ...]) -> BreakerSet:
        """The tokens that have one of the texts. May be called in a thread."""
        found = self._breakers.pop(texts, None) or find_breakers(self._data, self._ends, texts)
        self._breakers[texts] = found
        while len(self._breakers) > MAX_BREAKER_SETS:
            self._breakers.pop(next(iter(self._breakers)), None)
        return found

    def frame(self, version: str) -> ModelVocabulary:
        """The table for the scheduler."""
        control = array("i", sorted(self.control)).tobytes()
        return ModelVocabulary(version, self._data, self._ends.tobytes(), control, self.eos_ids)

    def shown(self, token: int, skip_special: bool, kept: Collection[bytes] = ()) -> bytes:
        """The bytes of the token that are text: none of a control token if `skip_special`, except those in `kept`."""
        if skip_special and token in self.control:
            piece = self.get(token) if kept else b""
            return piece if piece in kept else b""
        return self.get(token)

    def get(self, token: int) -> bytes:
        """The token's bytes; of a special token its name. b"" for an id outside the vocabulary."""
        ends = self._ends
        if not 0 <= token < len(ends):
            return b""
        return self._data[ends[token - 1] if token else 0 : ends[token]]
