"""Chunked encoding: the tokens of a long text chunk by chunk, equal to those of the whole text.

A step then takes time and memory in proportion to a chunk, and other requests run between two steps.

A window of the text is encoded at a time.  Names of special tokens are borders: the text between them is encoded as
texts of their own, all those of a window together, and the next window starts behind its last name.  Of a window
without names, all but the last `MARGIN` of its pieces are used, and the next window starts where they end.  A piece is
a match of the pre-tokenizer's patterns; merges never cross pieces.  The result is exact because

    a match depends only on the text after its start: no pattern looks back, so the pieces after a border are the same
        with or without the text before it;
    a match that ends before the window's end depends on few more pieces: an alternative consists of at most one
        character, runs of one character class, and one character of lookahead.  A run that a pattern inspects and
        does not consume (white space before a line's end, capitals without a following lower-case letter, an
        incomplete contraction) is at most three pieces, ten where white space is split into powers of two;
    where digits are grouped from the right, no border is used within a number that the window may cut;
    a window ends neither within nor behind white space that a name behind it could take.

If a window has too few pieces (a run of one character class can be as long as the text), its size is doubled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from functools import cache
from itertools import accumulate

import numpy as np

from stages.tokenizer.steps import each_step
from stages.tokenizer.stripping import Stripping
from stages.tokenizer.unicode_classes import characters

# Characters of a step, at most: some ms to cut, in which the interpreter lock is held, and ten to encode what is new.
# New words are merged together: with half of this a new text takes a quarter more time.
WINDOW = 32_768
MARGIN = 16  # pieces at a window's end that may change with the text after it
MAX_RUN = 1 << 18  # characters of a piece; merging them takes a tenth of a second, without the kernel about one
_BEGINNING = 4  # characters of a name that a pattern finds
_SEPARATOR = "\0"  # between pieces; a text that has it is cut another way
_FEW = 32  # pieces up to which slices are faster
NO_STRIPPING = Stripping()
Name = tuple[int, int, int]  # of a special token in a text: where it begins and ends, its id
Part = tuple[int, int, Name | None]  # of a text: where it begins and ends, and the name behind it
Placed = list[tuple[int, int]]  # names between pieces: how many pieces are before each, its id


class RunTooLong(Exception):
    """A run of more characters without a border than the kind of vocabulary takes."""


class SpecialTokenFinder:
    """Finds names of special tokens in a text; of several at the same position, the longest.

    A name that is found begins and ends with the white space that belongs to it.
    """

    def __init__(self, ids: Mapping[str, int], stripping: Stripping = NO_STRIPPING) -> None:
        self._ids, self.stripping = dict(ids), stripping
        self.lengths = sorted({len(name) for name in ids}, reverse=True)  # of names, in characters
        # Names are found by their beginnings: a pattern for thousands of whole ones takes long to compile.
        beginnings = sorted({name[:_BEGINNING] for name in ids})
        self._pattern = re.compile(_alternatives(beginnings)) if ids else None
        lengths: dict[str, set[int]] = {beginning: set() for beginning in beginnings}
        for name in ids:
            lengths[name[:_BEGINNING]].add(len(name))
        # By beginning: of the names that have it and of the names that it has, the longest first.
        self._lengths_by_beginning = {
            beginning: sorted(
                some.union(n for n in range(1, len(beginning)) if beginning[:n] in self._ids), reverse=True
            )
            for beginning, some in lengths.items()
        }
        # Runs of one character, such as line breaks: the length of the longest, where there is one of each length.
        others = {name[:_BEGINNING] for name in ids if name.strip(name[:1])}
        self._runs = {
            beginning: max(some)
            for beginning, some in lengths.items()
            if beginning not in others and all(beginning[:1] * n in self._ids for n in range(1, max(some) + 1))
        }

        self._all = re.compile(_pattern_of_all(ids, beginnings)) if ids else None

    def find_all(self, text: str, begin: int, end: int) -> list[Name]:
        """Return all names that `find` finds one behind the other, in less time."""
        names: list[Name] = []
        if self.stripping:
            while begin < end and (found := self.find(text, begin, end)) is not None:
                names.append(found)
                begin = found[1]
            return names
        if self._all is None:
            return names
        ids, stop = self._ids, end + self.lengths[0]
        while begin < end:
            for match in self._all.finditer(text, begin, stop):
                first, begin = match.span()
                if first >= end:
                    return names
                if match[1] is None:
                    names.append((first, begin, ids[match[0]]))
                    continue
                # Of the names with this beginning the longest; none: the search goes on behind its first character.
                begin = first + 1
                for length in self._lengths_by_beginning[match[0]]:
                    name = text[first : first + length]  # shorter at the text's end
                    token = ids.get(name)
                    if token is not None:
                        begin = first + len(name)
                        names.append((first, begin, token))
                        break
                if begin != match.end():
                    break
            else:
                return names
        return names

    def find(self, text: str, begin: int, end: int) -> Name | None:
        """Return (begin, end, token id) of the first name that starts in `text[begin:end]`; it may end after `end`.

        White space before it counts from `begin` on.
        """
        found = self._find(text, begin, end)
        return self.stripping.widened(text, begin, found) if found is not None and self.stripping else found

    def _find(self, text: str, begin: int, end: int) -> Name | None:
        """As `find`, without white space."""
        if self._pattern is None:
            return None
        while (found := self._pattern.search(text, begin, end + _BEGINNING - 1)) is not None:
            begin = found.start()
            if begin >= end:
                return None
            longest = self._runs.get(found.group())
            if longest is not None:
                run = text[begin : begin + longest]
                name = run[: len(run) - len(run.lstrip(run[0]))]
                return begin, begin + len(name), self._ids[name]
            for length in self._lengths_by_beginning[found.group()]:
                name = text[begin : begin + length]  # shorter at the text's end
                if name in self._ids:
                    return begin, begin + len(name), self._ids[name]
            begin += 1
        return None


class MarkedTokenFinder(SpecialTokenFinder):
    """Finds the same names, but those of control tokens only where the first and the last character are marked."""

    def __init__(self, names: SpecialTokenFinder, control_names: Collection[str], marks: Collection[int]) -> None:
        self._ids, self._pattern, self._runs, self._all = names._ids, names._pattern, names._runs, names._all
        self.stripping = names.stripping
        self._lengths_by_beginning = names._lengths_by_beginning
        self._control_names, self._marks = control_names, marks
        self.lengths = names.lengths

    def find_all(self, text: str, begin: int, end: int) -> list[Name]:
        """As `SpecialTokenFinder.find_all`."""
        names = super().find_all(text, begin, end)
        if self.stripping or all(self._counts(text[first:last], first) for first, last, _ in names):
            return names
        names = []
        while begin < end and (found := self.find(text, begin, end)) is not None:
            names.append(found)
            begin = found[1]
        return names

    def _find(self, text: str, begin: int, end: int) -> Name | None:
        while (found := super()._find(text, begin, end)) is not None:
            first, last, _ = found
            if self._counts(text[first:last], first):
                return found
            for length in self.lengths:  # a shorter name at the same position may count
                name = text[first : first + length]
                if first + length < last and name in self._ids and self._counts(name, first):
                    return first, first + length, self._ids[name]
            begin = first + 1
        return None

    def _counts(self, name: str, at: int) -> bool:
        return name not in self._control_names or (at in self._marks and at + len(name) - 1 in self._marks)


def part_windows(names: SpecialTokenFinder, text: str, window: int) -> Iterator[list[Part]]:
    """Yield the parts of a text between names, those of a window at a time.

    A part may be empty.  One without a name behind it goes on with the next part, unless the text ends there.
    """
    at = 0
    while at < len(text):
        limit = names.stripping.window_end(text, min(at + window, len(text)))
        parts: list[Part] = []
        for name in (*names.find_all(text, at, limit), None):
            end = limit if name is None else name[0]
            while end - at > window:  # white space that a name could take, of any length
                parts.append((at, at + window, None))
                yield parts
                parts, at = [], at + window
            if name is not None or at < end:
                parts.append((at, end, name))
                at = end if name is None else name[1]
        yield parts


def _pattern_of_all(names: Collection[str], beginnings: list[str]) -> str:
    """Return a pattern of whole names that are runs of one character, and of the others' beginnings: with group 1.

    It begins with a class of characters, which Python's `re` searches for in less time than for alternatives.
    """
    by_first: dict[str, list[str]] = {}
    for name in filter(None, names):
        by_first.setdefault(name[0], []).append(name)
    tails: dict[str, list[str]] = {}
    for beginning in beginnings:
        tails.setdefault(beginning[:1], []).append(beginning[1:])
    runs, others = [], []
    for first, some in by_first.items():
        lengths = {len(name) for name in some}
        least, most = min(lengths), max(lengths)
        if any(name.strip(first) for name in some) or len(lengths) < most - least + 1:
            others.append(f"(?<={re.escape(first)}){_alternatives(tails[first])}")
        else:
            runs.append(f"(?<={re.escape(first)}){re.escape(first)}{{{least - 1},{most - 1}}}")
    firsts = "".join(map(re.escape, by_first))
    return f"[{firsts}](?:{'|'.join([*runs, f'({chr(124).join(others)})' if others else '(?!)()'])})"


def _alternatives(names: list[str]) -> str:
    """Return a pattern that matches the longest of the names, which are sorted, unique and short."""
    by_first: dict[str, list[str]] = {}
    for name in filter(None, names):
        by_first.setdefault(name[0], []).append(name)
    branches = []
    for group in by_first.values():
        n = _common_prefix(group[0], group[-1])  # of all: the group is sorted
        rest = [name[n:] for name in group]
        branches.append(re.escape(group[0][:n]) + (_alternatives(rest) if rest != [""] else ""))
    return "(?:" + "|".join(branches) + ")" + ("?" if "" in names else "")


def _common_prefix(one: str, other: str) -> int:
    """Return the number of characters that both start with."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def encode_chunks(
    cut: Callable[[list[str]], list[int]],
    encode: Callable[[str, list[int], Placed], Generator[None, None, list[int]]],
    names: SpecialTokenFinder,
    text: str,
    window: int = WINDOW,
    groups_from_right: bool = False,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (end of a chunk in the text, its token ids) from the text's start to its end.

    A chunk may be empty: the window had no usable border, and the next one is twice as large; or a long piece takes
    several steps.

    cut: returns the lengths of the pieces of texts, one text after the other.  encode: returns the ids of the first
    pieces of a text, which have these lengths, and of the names between them, in steps.
    groups_from_right: the pieces of a number depend on all of its digits.
    """
    at, size = 0, window
    while at < len(text):
        end = names.stripping.window_end(text, min(at + size, len(text)))
        found = names.find_all(text, at, end)
        # What is before each name; the text behind the last one comes with the next window, unless it ends here.
        begins = [at, *(name[1] for name in found)]
        parts = [text[begin : name[0]] for begin, name in zip(begins, found)]
        stop = begins[-1]
        if not found or end == len(text):
            parts.append(text[stop:end])
            stop = end
        lengths = cut(parts)
        if found:
            size = window
        elif end < len(text):
            taken = _drop_uncertain(lengths, parts[0], groups_from_right)
            # A window of which little was used stays large: otherwise the rest would be cut several times.
            size = max(window, size // 2) if 4 * taken >= 3 * (end - at) else size if taken else 2 * size
            stop = at + taken
        if end - at > MAX_RUN and (longest := max(lengths, default=0 if found else end - at)) > MAX_RUN:
            raise RunTooLong(
                f"{longest} characters without a border between words, more than the tokenizer can process"
            )
        steps = encode("".join(parts), lengths, _place(found, parts, lengths))
        ids = yield from each_step(steps, at)
        at = stop
        yield at, ids


def _place(names: list[Name], parts: list[str], lengths: list[int]) -> Placed:
    """Return the place of each name between the pieces of the parts; before each name is one part."""
    if not names:
        return []
    name_ends = np.cumsum([len(part) for part in parts[: len(names)]])
    before = np.searchsorted(np.cumsum(lengths), name_ends, "right")  # no piece is empty
    return list(zip(before.tolist(), [token for _, _, token in names]))


def cut_pieces(text: str, lengths: list[int]) -> list[str]:
    """Return the first pieces of a text, which have these numbers of characters."""
    if len(lengths) <= _FEW or _SEPARATOR in text:
        ends = list(accumulate(lengths))
        return list(map(text.__getitem__, map(slice, [0, *ends], ends)))
    # Separators between all pieces take less time than a slice for each one.
    encoding, dtype = ("ascii", "u1") if text.isascii() else ("utf-32-le", "<u4")
    codes = np.frombuffer(text[: sum(lengths)].encode(encoding), dtype)
    borders = np.fromiter(accumulate(lengths[:-1]), np.int64, len(lengths) - 1)
    return np.insert(codes, borders, 0).tobytes().decode(encoding).split(_SEPARATOR)


@cache
def _numbers() -> re.Pattern[str]:
    """Return the pattern of a run of what patterns have as `\\p{N}`, whatever the Unicode version of this Python."""
    return re.compile(f"[{characters('N')}]*")


def _drop_uncertain(lengths: list[int], window: str, groups_from_right: bool) -> int:
    """Remove the last pieces, which depend on the text after the window; return how many characters are left.

    That is at least half of the window, or nothing.
    """
    last_border = len(window)
    if groups_from_right and (number := _numbers().match(window[::-1])) is not None:
        last_border -= number.end()
    taken = len(window) - sum(lengths[-MARGIN:])
    del lengths[-MARGIN:]
    while lengths and taken > last_border:
        taken -= lengths.pop()
    if 2 * taken < len(window):
        lengths.clear()
        return 0
    return taken
