"""SentencePiece's table of character replacements: `tokenizer.ggml.precompiled_charsmap` of GGUF files.

The bytes are

    u32          size of the trie, little-endian
    u32[]        the trie, a compact double array of the replaced texts' UTF-8 bytes (as `darts-clone` writes it)
    the rest     the replacements, each ended by a zero byte

A unit of the trie has the byte that leads to it (bits 0 to 7), whether a replaced text ends there (bit 8), and an
offset to its children (bits 10 to 31, times 256 if bit 9 is set): the child for a byte `c` is at the unit's position,
XOR the offset, XOR `c`.  The child for 0 has the place of the replacement and bit 31 set.

Unicode's table has 225,000 texts, nearly all of several characters: only single ones are listed, and others are looked
up.  The lists are part of a compiled vocabulary (`vocabulary_tables.py`):

    charsmap_trie   u32, the trie
    charsmap_texts  u8, the replacements
    charsmap_lists  msgpack of `_Lists`
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 1 << 24  # of the table; published ones have a quarter of a million
LONGEST = 32  # bytes of a replaced text that are looked up; the longest of Unicode's has 12
_MAX_REPLACEMENT = 256  # bytes; the longest of Unicode's has 33
_MAX_LISTED = 1 << 18  # beginnings of replaced texts
_GROUP = 4096  # units whose children are searched at once: some 20 MB
_SPACES = " \t\n\r"  # of which texts have many
_LABEL = 0x800000FF  # of a unit, with the bit that only replacements have


class _Lists(msgspec.Struct, array_like=True):
    single: dict[str, str]
    starts: set[str]
    seconds: set[str]
    apart: set[str]


class Charsmap:
    """A table; immutable. `data` may be empty. Raises `ValueError` for one that is damaged, or too large.

    single: characters and what they become.  starts: characters that texts of several characters begin with.
    seconds: characters that are second in one.
    """

    def __init__(self, data: bytes) -> None:
        self.single: dict[str, str] = {}
        self.starts: set[str] = set()
        self.seconds: set[str] = set()
        self._units: Sequence[int] = [0]
        self._replacements = b"\0"
        if not data:
            return
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has {len(data):,} bytes, expected at most {MAX_BYTES:,}")
        size = struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0
        if size < 4 or size % 4 or 4 + size >= len(data):
            raise ValueError(f"its trie has {size:,} bytes, expected a multiple of 4 below {len(data) - 4:,}")
        units = np.frombuffer(data, "<u4", size // 4, 4)
        self._replacements = data[4 + size :]
        _check_replacements(self._replacements)
        places = units[units >> np.uint32(31) == 1] & np.uint32(0x7FFFFFFF)
        if len(places) and int(places.max()) >= len(self._replacements):
            raise ValueError(f"a replacement is at byte {int(places.max()):,} of {len(self._replacements):,}")
        self._units = units.tolist()
        self._list(units)

    @classmethod
    def of_tables(cls, tables: Mapping[str, NDArray[Any]]) -> Self:
        """The table of a compiled vocabulary. Raises `KeyError`, `ValueError` for other tables."""
        made = cls(b"")
        lists = msgspec.msgpack.decode(tables["charsmap_lists"].tobytes(), type=_Lists)
        made.single, made.starts, made.seconds = lists.single, lists.starts, lists.seconds
        made.__dict__["apart"] = lists.apart
        made._units = tables["charsmap_trie"].data
        made._replacements = tables["charsmap_texts"].tobytes()
        if not len(made._units):
            raise ValueError("the table of replacements has no trie")
        return made

    def tables(self) -> dict[str, NDArray[Any]]:
        """Compile it."""
        lists = msgspec.msgpack.encode(_Lists(self.single, self.starts, self.seconds, self.apart))
        return {
            "charsmap_trie": np.array(self._units, np.uint32),
            "charsmap_texts": np.frombuffer(self._replacements, np.uint8),
            "charsmap_lists": np.frombuffer(lists, np.uint8),
        }

    @property
    def written(self) -> str:
        """All replacements one after the other."""
        return self._replacements.decode("utf-8", "replace")

    @cached_property
    def apart(self) -> set[str]:
        """White space that is in no text of several characters."""
        units = np.array(self._units, np.uint32)
        spaces = np.array([ord(space) for space in _SPACES])
        found: set[int] = set()
        is_new = np.ones(len(units), bool)  # unused units have labels as well: only those that are reached count
        level, is_root = np.zeros(1, np.int64), True
        while len(level):
            below = [np.zeros(0, np.int64)]
            for begin in range(0, len(level), _GROUP):
                bases = _bases(units, level[begin : begin + _GROUP])
                children = bases[:, None] ^ np.arange(1, 256)[None, :]
                inside = children < len(units)
                labels = units[np.where(inside, children, 0)] & np.uint32(_LABEL)
                is_child = inside & (labels == np.arange(1, 256, dtype=np.uint32)[None, :])
                has_child = is_child.any(axis=1)
                if is_root:
                    # A text of one space ends there, or goes on to other characters.
                    first = [int(child) for child in children[0, spaces - 1][is_child[0, spaces - 1]]]
                else:
                    found |= set(spaces[is_child[:, spaces - 1].any(axis=0)].tolist())
                    found |= {int(units[at]) & 0xFF for at in first if at in level[begin : begin + _GROUP][has_child]}
                reached = np.unique(children[is_child])
                reached = reached[is_new[reached]]
                is_new[reached] = False
                below.append(reached)
            level, is_root = np.concatenate(below), False
        return {space for space in _SPACES if ord(space) not in found}

    def _list(self, units: NDArray[np.uint32]) -> None:
        """Find the single characters, and the second ones: level by level from the root."""
        nodes, names, n_seen = _bases(units, np.zeros(1, np.int64)), [b""], 0
        while names:
            next_nodes: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
            next_names: list[bytes] = []
            for begin in range(0, len(names), _GROUP):
                children = nodes[begin : begin + _GROUP, None] ^ np.arange(1, 256)[None, :]
                inside = children < len(units)
                labels = units[np.where(inside, children, 0)] & np.uint32(_LABEL)
                of, byte = np.nonzero(inside & (labels == np.arange(1, 256, dtype=np.uint32)[None, :]))
                reached = children[of, byte]
                below = _bases(units, reached)
                is_end = (units[reached] >> np.uint32(8) & np.uint32(1)).tolist()
                kept = []
                for i, (parent, value) in enumerate(zip(of.tolist(), (byte + 1).tolist())):
                    name = names[begin + parent] + bytes([value])
                    if self._goes_on(name, int(below[i]), bool(is_end[i])):
                        kept.append(i)
                        next_names.append(name)
                next_nodes.append(below[kept])
                n_seen += len(kept)
                if n_seen > _MAX_LISTED:
                    raise ValueError(f"more than {_MAX_LISTED:,} pairs of characters begin its texts")
            nodes, names = np.concatenate(next_nodes), next_names

    def _goes_on(self, name: bytes, below: int, is_end: bool) -> bool:
        """List the beginning of a text, if it is a complete one. Returns whether the texts below it matter."""
        first = next(n for n, limit in enumerate((0x80, 0xE0, 0xF0, 0x100), 1) if name[0] < limit)
        if len(name) < first:
            return True
        try:
            if len(name) == first:
                character = name.decode()
                if is_end:
                    self.single[character] = self._replacement(below)
                return True
            text = name.decode()
        except UnicodeDecodeError:
            return len(name) < first + 4 and len(name) > first
        self.starts.add(text[0])
        self.seconds.add(text[1])
        return False

    def _replacement(self, base: int) -> str:
        unit = self._units[base] if 0 <= base < len(self._units) else 0
        at = unit & 0x7FFFFFFF
        if not unit >> 31:
            raise ValueError("its trie has a text without a replacement")
        return self._replacements[at : self._replacements.index(0, at)].decode("utf-8", "replace")

    def find(self, text: str, at: int) -> tuple[int, str] | None:
        """Return the end and the replacement of the longest text of several characters at a place; None: no one."""
        data, units = text[at : at + LONGEST].encode()[:LONGEST], self._units
        node = _base(units, 0)
        found = None
        for n, byte in enumerate(data, 1):
            node ^= byte
            if not byte or node >= len(units) or units[node] & _LABEL != byte:
                break
            is_end = units[node] >> 8 & 1
            node = _base(units, node)
            # Only whole characters count.
            if is_end and (n == len(data) or data[n] & 0xC0 != 0x80):
                found = n, node
        if found is None:
            return None
        n_characters = len(data[: found[0]].decode("utf-8", "ignore"))
        return (at + n_characters, self._replacement(found[1])) if n_characters > 1 else None


@lru_cache(maxsize=2)
def read_charsmap(data: bytes) -> Charsmap:
    """A table, read once by the check of a vocabulary and the vocabulary. Raises `ValueError`."""
    return Charsmap(data)


def _check_replacements(data: bytes) -> None:
    if data[-1]:
        raise ValueError("its last replacement has no end")
    try:
        data.decode()
    except UnicodeDecodeError:
        raise ValueError("its replacements are not UTF-8") from None
    longest = max(map(len, data.split(b"\0")))
    if longest > _MAX_REPLACEMENT:
        raise ValueError(f"a replacement has {longest:,} bytes, expected at most {_MAX_REPLACEMENT}")


def _base(units: Sequence[int], at: int) -> int:
    """Where the children of a unit are, before XOR with their bytes."""
    return at ^ (units[at] >> 10 << ((units[at] & 0x200) >> 6))


def _bases(units: NDArray[np.uint32], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """As `_base`, of several units."""
    unit = units[at].astype(np.int64)
    return np.asarray(at ^ (unit >> 10 << ((unit & 0x200) >> 6)), np.int64)
