r"""The patterns of a pre-tokenizer, run on classes of characters.

The patterns of `pipeline/models/pretokenizers.py` distinguish few classes of characters.  Each character of a text is
replaced by the number of its class, one byte, and the patterns by ones over bytes: Python's `re` then needs no tables
of Unicode and does not depend on its version.  Each pattern cuts all pieces of the one before at once: behind each is a
byte that no pattern matches.  The syntax is what the patterns use: alternatives, groups without a
number, lookahead, counts, possessive `*+`, classes with ranges and `&&`, `\p{L}`, `\s`, `\x{...}`, `\z`.  Both engines
take the first alternative that matches, so that the pieces are those of the `tokenizers` library: a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from pipeline.models.pretokenizers import PreTokenizer
from stages.tokenizer.unicode_classes import CLASSES, CODE_POINTS, runs

_PROPERTIES = {"L", "M", "N", "P", "S"}
_END = b"\xff"  # the class of no character: behind each piece
_SHORT = 12  # characters of a piece, on average: below it most are known
_KNOWN_CHARACTERS = 32  # of a piece that is remembered
_MAX_KNOWN = 1 << 14  # such pieces; some MB
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
Bools = NDArray[np.bool_]


class _Set:
    """A set of characters, as an expression over ranges and classes."""

    def __init__(self, ranges: list[tuple[int, int]], classes: list[tuple[str, bool]]) -> None:
        self.ranges, self.classes = ranges, classes  # (first, last); (class, is its complement)
        self.parts: list[_Set] = []  # joined
        self.others: list[_Set] = []  # intersected with
        self.is_negated = False

    def all_ranges(self) -> Iterator[tuple[int, int]]:
        yield from self.ranges
        for part in (*self.parts, *self.others):
            yield from part.all_ranges()

    def members(self, begins: NDArray[np.int64], classes: NDArray[np.uint8]) -> Bools:
        """Return which of the stretches of characters are in the set."""
        found = np.zeros(len(begins), bool)
        for first, last in self.ranges:
            found |= (begins >= first) & (begins <= last)
        for name, is_complement in self.classes:
            found |= (classes == CLASSES[name]) != is_complement
        for part in self.parts:
            found |= part.members(begins, classes)
        for other in self.others:
            found &= other.members(begins, classes)
        return ~found if self.is_negated else found


class _Reader:
    """Reads one pattern as texts, which stay as they are, and sets of characters."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def read(self) -> list[str | _Set]:
        parts: list[str | _Set] = []
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "[":
                self._at += 1
                parts.append(self._class())
            elif character == "\\":
                parts.append(self._escape())
            elif character == "{":  # a count
                end = self._pattern.index("}", self._at) + 1
                parts.append(self._pattern[self._at : end])
                self._at = end
            elif self._pattern.startswith(("(?:", "(?=", "(?!"), self._at):
                parts.append(self._pattern[self._at : self._at + 3])
                self._at += 3
            elif character in "()|*+?":
                parts.append(character)
                self._at += 1
            else:
                parts.append(_Set([(ord(character),) * 2], []))
                self._at += 1
        return parts

    def _escape(self) -> str | _Set:
        kind = self._pattern[self._at + 1]
        self._at += 2
        if kind == "z":
            return f"(?={re.escape(_END.decode('latin-1'))})"
        if kind in "pP":
            name = self._braces()
            if name not in _PROPERTIES:
                raise ValueError(f"unknown property {name!r} in {self._pattern!r}")
            return _Set([], [(name, kind == "P")])
        if kind in "sS":
            return _Set([], [("_", kind == "S")])
        code = int(self._braces(), 16) if kind == "x" else ord(_CONTROLS.get(kind, kind))
        if kind.isalnum() and kind != "x" and kind not in _CONTROLS:
            raise ValueError(f"unknown escape \\{kind} in {self._pattern!r}")
        return _Set([(code, code)], [])

    def _braces(self) -> str:
        end = self._pattern.index("}", self._at)
        text = self._pattern[self._at + 1 : end]
        self._at = end + 1
        return text

    def _class(self) -> _Set:
        """Read a class behind its opening bracket."""
        whole = current = _Set([], [])
        if self._pattern[self._at] == "^":
            whole.is_negated = True
            self._at += 1
        while (character := self._pattern[self._at]) != "]":
            if character == "[":
                self._at += 1
                current.parts.append(self._class())
            elif self._pattern.startswith("&&", self._at):
                self._at += 2
                current = _Set([], [])
                whole.others.append(current)
            else:
                first = self._member()
                is_range = self._pattern[self._at] == "-" and self._pattern[self._at + 1] != "]"
                if is_range and len(first.ranges) == 1:
                    self._at += 1
                    ((last, _),) = self._member().ranges
                    first.ranges = [(first.ranges[0][0], last)]
                current.parts.append(first)
        self._at += 1
        return whole

    def _member(self) -> _Set:
        if self._pattern[self._at] == "\\":
            found = self._escape()
            assert isinstance(found, _Set)
            return found
        self._at += 1
        return _Set([(ord(self._pattern[self._at - 1]),) * 2], [])


class PiecePattern:
    """Cuts texts into pieces, as a pre-tokenizer does."""

    def __init__(self, pre: PreTokenizer) -> None:
        """Raises `ValueError` for syntax that no known pre-tokenizer has."""
        patterns = (pre.at_once,) if pre.at_once else pre.patterns
        read = [_Reader(pattern).read() for pattern in patterns]
        sets = [part for parts in read for part in parts if isinstance(part, _Set)]
        # Stretches of code points that no set divides.
        begins, classes = runs()
        cuts = {edge for one in sets for first, last in one.all_ranges() for edge in (first, last + 1)}
        all_begins = np.union1d(begins, [cut for cut in cuts if cut < CODE_POINTS])
        all_classes = classes[np.searchsorted(begins, all_begins, "right") - 1]
        members = np.stack([one.members(all_begins, all_classes) for one in sets])
        # Stretches are of one class if they are in the same sets.
        numbers: dict[bytes, int] = {}
        of_stretch = [numbers.setdefault(row.tobytes(), len(numbers)) for row in np.packbits(members, axis=0).T]
        if len(numbers) >= ord(_END):
            raise ValueError(f"{len(numbers)} classes of characters, expected at most {ord(_END)}")
        lengths = np.diff(np.append(all_begins, CODE_POINTS))
        self._classes = np.repeat(np.array(of_stretch, np.uint8), lengths)  # (CODE_POINTS,)
        bytes_of = iter([_byte_class(sorted({of_stretch[i] for i in np.flatnonzero(row)})) for row in members])
        self._patterns = [
            re.compile(
                b"(%b)"
                % b"".join(part.encode("latin-1") if isinstance(part, str) else next(bytes_of) for part in parts)
            )
            for parts in read
        ]
        # What the patterns from each one on cut short pieces into: that depends on their classes alone.
        self._known: list[dict[bytes, list[int]]] = [{} for _ in patterns]

    def lengths(self, texts: list[str]) -> list[int]:
        """Return the characters of each piece of texts without lone surrogates, those of one text after the other's."""
        codes = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4")
        classes = self._classes[codes].tobytes()
        if len(texts) == 1:
            return self._lengths([classes], 0)
        ends = list(accumulate(map(len, texts)))
        return self._lengths(list(map(classes.__getitem__, map(slice, [0, *ends], ends))), 0)

    def _lengths(self, pieces: list[bytes], first: int) -> list[int]:
        """Return the characters of the pieces that the patterns from `first` on cut pieces into."""
        for i in range(first, len(self._patterns)):
            if i > first and _SHORT * len(pieces) > sum(map(len, pieces)):
                return self._known_lengths(pieces, i)
            pieces = self._cut(pieces, i)
        return list(map(len, pieces))

    def _cut(self, pieces: list[bytes], first: int) -> list[bytes]:
        """Cut all pieces by one pattern."""
        # The matches, and what is between them.
        parts = self._patterns[first].split(_END.join(pieces) + _END)
        if len(pieces) == 1:
            parts[-1] = parts[-1][:-1]
            return list(filter(None, parts))
        return list(filter(None, _END.join(parts).split(_END)))

    def _known_lengths(self, pieces: list[bytes], first: int) -> list[int]:
        """As `_lengths`, and remember what short pieces are cut into."""
        known = self._known[first]
        missing = set(pieces).difference(known)
        if missing:
            found = {piece: self._lengths([piece], first) for piece in missing}
            short = {piece: lengths for piece, lengths in found.items() if len(piece) <= _KNOWN_CHARACTERS}
            if len(known) + len(short) > _MAX_KNOWN:
                self._known[first] = {}  # another thread may be reading the old one
                known = {piece: known[piece] for piece in pieces if piece in known} | found
            else:
                known |= short
                if len(short) < len(found):
                    known = {piece: found[piece] if piece in found else known[piece] for piece in pieces}
        return list(chain.from_iterable(map(known.__getitem__, pieces)))


def _byte_class(numbers: list[int]) -> bytes:
    """Return the pattern for one of some bytes."""
    if not numbers:
        return rb"[^\x00-\xff]"
    return b"[" + b"".join(rb"\x%02x" % number for number in numbers) + b"]"


@cache
def piece_pattern(pre: PreTokenizer) -> PiecePattern:
    """Return the patterns of a pre-tokenizer, made once per process."""
    return PiecePattern(pre)
