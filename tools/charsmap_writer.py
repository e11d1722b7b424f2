"""Writes SentencePiece's table of character replacements (pipeline/models/charsmap.py), for vocabularies of tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import count

_LEAF = 1 << 8


def write_charsmap(replaced: Mapping[str, str]) -> bytes:
    """Return the table. Texts and replacements have no zero characters, and texts are not empty."""
    places: dict[str, int] = {}
    replacements = b""
    for to in replaced.values():
        if to not in places:
            places[to] = len(replacements)
            replacements += to.encode() + b"\0"
    children: dict[bytes, set[int]] = {b"": set()}
    ends = {key.encode(): places[to] for key, to in replaced.items()}
    for key in ends:
        for at, byte in enumerate(key):
            children.setdefault(key[:at], set()).add(byte)
            children.setdefault(key[: at + 1], set())
    units: dict[int, int] = {0: 0}
    bases: set[int] = set()  # each has one parent: a label alone does not tell whose child a unit is
    at_of = {b"": 0}
    for name in sorted(children, key=lambda one: (len(one), one)):
        labels = [*children[name], *([0] if name in ends else [])]
        if not labels:
            continue
        base = next(b for b in count() if b not in bases and not any(b ^ label in units for label in labels))
        bases.add(base)
        units[at_of[name]] |= (at_of[name] ^ base) << 10
        for label in children[name]:
            at_of[name + bytes([label])] = base ^ label
            units[base ^ label] = label
        if name in ends:
            units[at_of[name]] |= _LEAF
            units[base] = ends[name] | 1 << 31
    array = [units.get(at, 0) for at in range((max(units) | 0xFF) + 1)]
    return struct.pack("<I", 4 * len(array)) + struct.pack(f"<{len(array)}I", *array) + replacements
