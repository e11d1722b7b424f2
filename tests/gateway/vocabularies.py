"""Vocabularies as the gateway has them."""

from __future__ import annotations

from array import array

from pipeline.protocol.messages import Described
from stages.gateway.requests.token_bytes import TokenBytes


def vocabulary_of(pieces: list[bytes], control: tuple[int, ...] = ()) -> TokenBytes:
    """A vocabulary of these tokens; `control`: the ids of those that are not text."""
    ends, table = array("I"), TokenBytes()
    for piece in pieces:
        ends.append((ends[-1] if ends else 0) + len(piece))
    described = Described("", "m", "", len(pieces), 9, (), False, pieces=b"".join(pieces), piece_ends=ends.tobytes())
    table.fill(described)
    table.control = frozenset(control)
    return table
