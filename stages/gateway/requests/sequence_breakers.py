"""Which tokens break repetitions for the DRY sampler: those whose bytes have one of the given texts."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import DRY_BREAKERS


class BreakerSet(NamedTuple):
    """The result for some texts. `missing`: the texts that no token has."""

    mask: bytes  # u32 little-endian: bit t % 32 of word t // 32 for token t
    missing: tuple[str, ...]

    def checked(self, texts: tuple[str, ...]) -> BreakerSet:
        """The result for `texts`. Raises `InvalidRequest` for one that no token has, unless they are the default."""
        if self.missing and texts != DRY_BREAKERS:
            raise InvalidRequest(
                f"dry_sequence_breakers has {self.missing[0]!r}, which no token of the model has as a whole; leave it "
                f"out, or give a shorter part of it",
                "dry_sequence_breakers",
            )
        return self


def find_breakers(pieces: bytes, ends: Sequence[int], texts: tuple[str, ...]) -> BreakerSet:
    """Search the bytes of all tokens. `pieces`: one after the other; `ends`: where each one ends.

    Takes milliseconds for a text that many tokens have.
    """
    mask = bytearray(4 * -(-len(ends) // 32))
    missing = []
    for text in texts:
        wanted, found, at = text.encode("utf-8", "surrogatepass"), False, 0
        while (at := pieces.find(wanted, at)) >= 0:
            token = bisect_right(ends, at)
            if at + len(wanted) <= ends[token]:
                mask[token // 8] |= 1 << token % 8
                found, at = True, ends[token]
            else:
                at += 1
        if not found:
            missing.append(text)
    return BreakerSet(bytes(mask), tuple(missing))


def breakers_of(pieces: Sequence[bytes], texts: tuple[str, ...]) -> BreakerSet:
    """The same for a list of tokens."""
    ends, length = array("I"), 0
    for piece in pieces:
        length += len(piece)
        ends.append(length)
    return find_breakers(b"".join(pieces), ends, texts)
