"""Prompt scores: the log probabilities of a prompt's tokens, as the scheduler sends them piece by piece.

A score tells how likely a token of the prompt was after those before it; the first token has none.  They are kept as
they come, in 8 bytes for each value: a request may have hundreds of thousands.  Pure; `requests/relay.py` fills it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class TokenScore(NamedTuple):
    """Of one token: its rank among all, from 1, its log probability, and the ids with the highest ones."""

    rank: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class PromptScores:
    """The scores of one prompt of `n_tokens` tokens, each with `top` others."""

    __slots__ = ("_format", "data", "n_tokens", "top")

    def __init__(self, top: int, n_tokens: int) -> None:
        self.top = top
        self.n_tokens = n_tokens
        self.data = bytearray()  # of each token but the first: rank and log probability, then ids and theirs
        self._format = struct.Struct("<" + "if" * (1 + top))

    @property
    def known(self) -> int:
        """Leading tokens that need no score any more, the first one included."""
        return 1 + len(self.data) // self._format.size

    @property
    def is_complete(self) -> bool:
        """All tokens have their score."""
        return self.known >= self.n_tokens

    def add(self, start: int, data: bytes) -> bool:
        """Store the scores of the tokens from index `start` on, as far as they are new. False: some are missing."""
        if start > self.known or len(data) % self._format.size:
            return False
        self.data += data[(self.known - start) * self._format.size :]
        return True

    def __getitem__(self, index: int) -> TokenScore | None:
        """The score of the token with that index in the prompt; None for the first one."""
        if not index:
            return None
        rank, logprob, *rest = self._format.unpack_from(self.data, (index - 1) * self._format.size)
        return TokenScore(rank, logprob, tuple(zip(rest[::2], rest[1::2])))
