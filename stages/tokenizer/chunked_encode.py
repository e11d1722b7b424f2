"""A text's tokens stretch by stretch, the same as of the whole: a call into the library takes time and memory in
proportion to a stretch, and between two of them others have their turn.

Names of special tokens are borders: what is between them is encoded for itself anyway.  Elsewhere a window of the
text is encoded, and of its pieces (the matches of the pre-tokenizer's patterns, between which nothing merges) all
but the last `MARGIN` count; the next window begins where they end.  That is exact because

    a match depends on what is right of its beginning only: no pattern looks back, and none has anchors, so the
        pieces from a border on are the same whether the text before it is there or not;
    a match that does not end with the window looks no further than into the third piece after it: an alternative
        is at most one character, runs of one class of characters, and one character looked ahead.  A run that it
        looks through and does not take (white space before a line's end, capitals that no small letter follows,
        a contraction that is none) is cut into at most three pieces.

A window without enough pieces (a run of one class of characters can be as long as the text) is doubled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from tokenizers import Encoding, Tokenizer

WINDOW = 32_768  # characters: about 30 ms, and 6 MB
MARGIN = 8  # pieces at a window's end that may be others when the text goes on
SHORT = 4096  # characters: about 4 ms
_DEEP = 40  # of groups in a pattern: `re` is recursive


class RunTooLong(Exception):
    """Of ten millions and more: the library's patterns go back a bounded number of steps."""


class Names:
    """Finds names of special tokens, the longest where several begin."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._longest = max(map(len, ids), default=0)
        # By common beginnings: with one alternative for each name a text of "<" would be compared with all of them
        # at each character.
        self._pattern = re.compile(_alternatives(sorted(ids))) if ids else None

    def next(self, text: str, begin: int, end: int) -> tuple[int, int, int] | None:
        """(begin, end, token id) of the first name that begins in `text[begin:end]`; it may end after that."""
        if self._pattern is None:
            return None
        found = self._pattern.search(text, begin, end + self._longest - 1)
        if found is None or found.start() >= end:
            return None
        return found.start(), found.end(), self._ids[found.group()]


def _alternatives(names: list[str], depth: int = 0) -> str:
    """A pattern of the names (sorted, different), in which the longest that matches is taken."""
    if depth > _DEEP:
        return "(?:" + "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) + ")"
    by_first: dict[str, list[str]] = {}
    for name in filter(None, names):
        by_first.setdefault(name[0], []).append(name)
    branches = []
    for group in by_first.values():
        n = _common(group[0], group[-1])  # sorted: what these have in common, all have
        rest = [name[n:] for name in group]
        branches.append(re.escape(group[0][:n]) + (_alternatives(rest, depth + 1) if rest != [""] else ""))
    return "(?:" + "|".join(branches) + ")" + ("?" if "" in names else "")


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def stretches(tokenizer: Tokenizer, names: Names, text: str, window: int = WINDOW) -> Iterator[tuple[int, list[int]]]:
    """(where a stretch ends, its token ids) from the text's beginning to its end.

    A stretch may be empty: more of the text was needed at once, and the next call takes more time.
    """
    at, size = 0, window
    while at < len(text):
        end = min(at + size, len(text))
        name = names.next(text, at, end)
        if name is None and end < len(text):
            ids, taken = _beginning(tokenizer, text[at:end])
            # With less than half of it taken, much would be encoded again and again.
            size = max(window, size // 2) if 4 * taken >= 3 * size else size if taken else 2 * size
            at += taken
            yield at, ids
            continue
        if name is not None:
            end = name[0]
        ids = _encode(tokenizer, text[at:end]) if end > at else []
        at, size = end, window
        if name is not None:
            at = name[1]
            ids.append(name[2])
        yield at, ids


def _encode(tokenizer: Tokenizer, piece: str) -> list[int]:
    if len(piece) < SHORT:
        ids: list[int] = tokenizer.encode(piece, add_special_tokens=False).ids
        return ids
    return list(_call(tokenizer.encode_batch_fast, piece).ids)


def _call(encode: Callable[..., list[Encoding]], text: str) -> Encoding:
    """Only a batch is encoded without the interpreter's lock, which others want meanwhile."""
    try:
        (encoded,) = encode([text], add_special_tokens=False)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's, which cannot be imported
            raise
        raise RunTooLong(
            f"{len(text)} characters without a border between words, more than the tokenizer takes ({error})"
        ) from None
    return encoded


def _beginning(tokenizer: Tokenizer, window: str) -> tuple[list[int], int]:
    """Token ids that the window's first characters have whatever comes after it, and how many these are.

    At least half of the window, or nothing.
    """
    encoding = _call(tokenizer.encode_batch, window)
    last = encoding.token_to_word(len(encoding) - 1) if len(encoding) else None
    for word in range((last or 0) - MARGIN + 1, 0, -1):
        before, after = encoding.word_to_chars(word - 1), encoding.word_to_chars(word)
        # Between pieces that do not touch, characters without a token were lost: whose they were is not known.
        if before is None or after is None or before[1] != after[0]:
            continue
        taken, tokens = after[0], encoding.word_to_tokens(word)
        if 2 * taken < len(window):
            break
        if tokens is not None:
            return list(encoding.ids[: tokens[0]]), taken
    return [], 0
