"""Chunked encoding: the tokens of a long text chunk by chunk, equal to those of the whole text.

A call into the library then takes time and memory in proportion to a chunk, and other requests run between two calls.

Names of special tokens are chunk borders: the text between them is encoded separately in any case.  Elsewhere a
window of the text is encoded.  All but the last `MARGIN` of its pieces are used, and the next window starts where they
end.  A piece is a match of the pre-tokenizer's patterns; merges never cross pieces.  The result is exact because

    a match depends only on the text after its start: no pattern looks back, so the pieces after a border are the same
        with or without the text before it;
    a match that ends before the window's end depends on few more pieces: an alternative consists of at most one
        character, runs of one character class, and one character of lookahead.  A run that a pattern inspects and
        does not consume (white space before a line's end, capitals without a following lower-case letter, an
        incomplete contraction) is at most three pieces, ten where white space is split into powers of two;
    where digits are grouped from the right, no border is used within a number that the window may cut.

If a window has too few pieces (a run of one character class can be as long as the text), its size is doubled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

from tokenizers import Encoding, Tokenizer

WINDOW = 32_768  # characters: about 30 ms, and 6 MB
MARGIN = 16  # pieces at a window's end that may change with the text after it
SHORT = 4096  # characters: about 4 ms, short enough to hold the interpreter lock
_MAX_DEPTH = 40  # of nested groups in a pattern: `re` is recursive


class RunTooLong(Exception):
    """A run of ten million characters or more without a border: the library's regular expressions give up."""


class SpecialTokenFinder:
    """Finds names of special tokens in a text; of several at the same position, the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._longest = max(map(len, ids), default=0)
        self.lengths = sorted({len(name) for name in ids}, reverse=True)  # of names, in characters
        # A trie, because alternatives for whole names would compare each "<" in the text with all names.
        self._pattern = re.compile(_alternatives(sorted(ids))) if ids else None

    def find(self, text: str, begin: int, end: int) -> tuple[int, int, int] | None:
        """Return (begin, end, token id) of the first name that starts in `text[begin:end]`; it may end after `end`."""
        if self._pattern is None:
            return None
        found = self._pattern.search(text, begin, end + self._longest - 1)
        if found is None or found.start() >= end:
            return None
        return found.start(), found.end(), self._ids[found.group()]


class MarkedTokenFinder(SpecialTokenFinder):
    """Finds the same names, but those of control tokens only where the first and the last character are marked."""

    def __init__(self, names: SpecialTokenFinder, control_names: Collection[str], marks: Collection[int]) -> None:
        self._ids, self._longest, self._pattern = names._ids, names._longest, names._pattern
        self._control_names, self._marks = control_names, marks
        self._lengths = names.lengths

    def find(self, text: str, begin: int, end: int) -> tuple[int, int, int] | None:
        """As `SpecialTokenFinder.find`."""
        while (found := super().find(text, begin, end)) is not None:
            first, last, _ = found
            if self._counts(text[first:last], first):
                return found
            for length in self._lengths:  # a shorter name at the same position may count
                name = text[first : first + length]
                if first + length < last and name in self._ids and self._counts(name, first):
                    return first, first + length, self._ids[name]
            begin = first + 1
        return None

    def _counts(self, name: str, at: int) -> bool:
        return name not in self._control_names or (at in self._marks and at + len(name) - 1 in self._marks)


def _alternatives(names: list[str], depth: int = 0) -> str:
    """Return a pattern that matches the longest of the names, which are sorted and unique."""
    if depth > _MAX_DEPTH:
        return "(?:" + "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) + ")"
    by_first: dict[str, list[str]] = {}
    for name in filter(None, names):
        by_first.setdefault(name[0], []).append(name)
    branches = []
    for group in by_first.values():
        n = _common_prefix(group[0], group[-1])  # of all: the group is sorted
        rest = [name[n:] for name in group]
        branches.append(re.escape(group[0][:n]) + (_alternatives(rest, depth + 1) if rest != [""] else ""))
    return "(?:" + "|".join(branches) + ")" + ("?" if "" in names else "")


def _common_prefix(one: str, other: str) -> int:
    """Return the number of characters that both start with."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def encode_chunks(
    tokenizer: Tokenizer,
    names: SpecialTokenFinder,
    text: str,
    window: int = WINDOW,
    groups_from_right: bool = False,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (end of a chunk in the text, its token ids) from the text's start to its end.

    A chunk may be empty: the window had no usable border, and the next one is twice as large.
    groups_from_right: the pieces of a number depend on all of its digits.
    """
    at, size = 0, window
    while at < len(text):
        end = min(at + size, len(text))
        name = names.find(text, at, end)
        if name is None and end < len(text):
            ids, taken = _encode_window(tokenizer, text[at:end], groups_from_right)
            # A window of which little was used stays large: otherwise the rest would be encoded several times.
            size = max(window, size // 2) if 4 * taken >= 3 * size else size if taken else 2 * size
            at += taken
            yield at, ids
            continue
        if name is not None:
            end = name[0]
        ids = _encode_all(tokenizer, text[at:end]) if end > at else []
        at, size = end, window
        if name is not None:
            at = name[1]
            ids.append(name[2])
        yield at, ids


def _encode_all(tokenizer: Tokenizer, text: str) -> list[int]:
    if len(text) < SHORT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids
    return list(_call(tokenizer.encode_batch_fast, text).ids)


def _call(encode: Callable[..., list[Encoding]], text: str) -> Encoding:
    """Encode as a batch of one: only for batches does the library release the interpreter lock."""
    try:
        (encoded,) = encode([text], add_special_tokens=False)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's exception, which cannot be imported
            raise
        raise RunTooLong(
            f"{len(text)} characters without a border between words, more than the tokenizer can process ({error})"
        ) from None
    return encoded


def _encode_window(tokenizer: Tokenizer, window: str, groups_from_right: bool) -> tuple[list[int], int]:
    """Return the token ids that do not depend on the text after the window, and how many characters they cover.

    They cover at least half of the window, or nothing.
    """
    encoding = _call(tokenizer.encode_batch, window)
    last_border = len(window)
    while groups_from_right and last_border and window[last_border - 1].isnumeric():
        last_border -= 1
    last = encoding.token_to_word(len(encoding) - 1) if len(encoding) else None
    for word in range((last or 0) - MARGIN + 1, 0, -1):
        before, after = encoding.word_to_chars(word - 1), encoding.word_to_chars(word)
        # A gap between pieces means dropped characters (without a token), and they could belong to either piece.
        if before is None or after is None or before[1] != after[0]:
            continue
        taken, tokens = after[0], encoding.word_to_tokens(word)
        if taken > last_border:
            continue
        if 2 * taken < len(window):
            break
        if tokens is not None:
            return list(encoding.ids[: tokens[0]]), taken
    return [], 0
