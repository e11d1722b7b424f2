"""One session: the tokens of a conversation, in the order of its turns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stages.kv.pool.prefix_hash import PageDigest


@dataclass
class Session:
    id: str
    tenant: str
    salt: str
    ttl_s: int  # closed when unused for so long; 0: never
    created: float  # s since 1970
    last_use: float
    tokens: array[int] = field(default_factory=lambda: array("i"))
    turns: int = 0  # committed
    last_base: int = 0  # how many tokens the last turn kept of what was there before
    holder: bytes = b""  # whose turn is under way; b"": none is
    digests: list[PageDigest] = field(default_factory=list)  # names of its full pages

    @property
    def turn(self) -> int:
        """The number of the turn that is under way or comes next."""
        return self.turns + 1

    def append(self, base: int, tokens: bytes, when: float) -> None:
        """Commit a turn: keep the first `base` tokens, then add `tokens` (int32 each)."""
        del self.tokens[base:]
        self.tokens.frombytes(tokens)
        self.turns += 1
        self.last_base = base
        self.last_use = when
