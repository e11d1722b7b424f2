"""Normalizes texts as SentencePiece's unigram vocabularies ask for: characters are replaced, then spaces merged.

A text may come in parts.  Of several texts to replace at one place the longest counts, from left to right; so all but
the end of a part is certain before the next one is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.models.charsmap import LONGEST, Charsmap
from pipeline.models.vocabularies import SPACE
from stages.tokenizer.unicode_classes import CODE_POINTS


class Normalizer:
    """The rules. Immutable.

    charsmap: texts and what they become.  adds_space: a text begins with a space.  merges_spaces: spaces at the ends
    are dropped, several become one, and every word has one before it.
    """

    def __init__(self, charsmap: Charsmap, adds_space: bool, merges_spaces: bool) -> None:
        self._charsmap = charsmap
        self._single = str.maketrans(charsmap.single)
        self.adds_space, self.merges_spaces = adds_space, merges_spaces
        self.has_prefix = adds_space or merges_spaces  # before the first word
        self.longest = LONGEST if charsmap.starts else 1  # characters that are replaced together
        # Whether each word is normalized on its own, and with spaces merged has one before it.
        is_plain = charsmap.single.get(" ", " ") == " " and " " in charsmap.apart
        self.keeps_words = merges_spaces and is_plain and SPACE not in charsmap.written
        self._spaces = [c for c in charsmap.apart if charsmap.single.get(c) == " "]  # which mean the same

    @cached_property
    def _kinds(self) -> NDArray[np.uint8]:
        """Of each code point: 1 if several characters that are replaced begin with it, and 2 if it is the second."""
        kinds = np.zeros(CODE_POINTS, np.uint8)
        for characters, bit in ((self._charsmap.starts, 1), (self._charsmap.seconds, 2)):
            kinds[np.fromiter(map(ord, characters), np.int64)] |= np.uint8(bit)
        return kinds

    def _candidates(self, text: str) -> list[int]:
        """Where several characters may begin that are replaced: by their first two, which few texts have."""
        if not self._charsmap.starts or len(text) < 2:
            return []
        kinds = self._kinds[np.frombuffer(text.encode("utf-32-le"), "<u4")]
        return np.flatnonzero(kinds[:-1] & (kinds[1:] >> np.uint8(1)) & np.uint8(1)).tolist()

    def words(self, text: str) -> list[str]:
        """Return the words of a text, as they are written; some may be empty. Where the rules keep words."""
        for character in self._spaces:
            text = text.replace(character, " ")
        return text.split(" ")

    def parts(self, text: str) -> list[str]:
        """Return the words of a text normalized, without the space before each; none is empty. Where the rules keep
        words."""
        return list(filter(None, self.replaced(text, True)[0].split(" ")))

    def written(self, words: list[str]) -> list[str]:
        """Return words normalized, their spaces and the one before each as U+2581. Where the rules keep words."""
        normalized = self.replaced("\0".join(words), True)[0].split("\0")  # which no rule replaces
        if len(normalized) != len(words):
            normalized = [self.replaced(word, True)[0] for word in words]
        return ["".join([SPACE + part for part in text.split(" ") if part]) for text in normalized]

    def replaced(self, text: str, is_end: bool) -> tuple[str, int]:
        """Return the beginning of a text with its characters replaced, and how many characters of it that is.

        is_end: nothing follows the text, so that all of it is replaced.
        """
        last = len(text) if is_end else max(0, len(text) - self.longest + 1)  # matches before it are certain
        candidates = self._candidates(text)
        if not candidates:
            return text[:last].translate(self._single), last
        out, at = [], 0
        for begin, end, to in self._matches(text, candidates):
            if begin >= last:
                break
            out += [text[at:begin].translate(self._single), to]
            at = end
        if at < last:
            out.append(text[at:last].translate(self._single))
            at = last
        return "".join(out), at

    def _matches(self, text: str, candidates: list[int]) -> Iterator[tuple[int, int, str]]:
        """Yield (begin, end, replacement) of each match of several characters, from left to right."""
        at = 0
        for begin in candidates:
            found = self._charsmap.find(text, begin) if begin >= at else None
            if found is not None:
                at, to = found
                yield begin, at, to

    def aligned(self, text: str, is_end: bool) -> tuple[list[str], list[int]]:
        """As `replaced`: what each character, or several that are replaced together, becomes, and where it ends."""
        last = len(text) if is_end else max(0, len(text) - self.longest + 1)
        single = self._charsmap.single
        parts: list[str] = []
        ends: list[int] = []
        at = 0
        for begin, end, to in (*self._matches(text, self._candidates(text)), (last, last, "")):
            begin = min(begin, last)
            parts += [single.get(character, character) for character in text[at:begin]]
            ends += range(at + 1, begin + 1)
            if begin == last:
                break
            parts.append(to)
            ends.append(end)
            at = end
        return parts, ends


class Spaces:
    """Writes the spaces of one text as U+2581, part by part."""

    def __init__(self, rules: Normalizer) -> None:
        self._merges = rules.merges_spaces
        self._needs_prefix = rules.adds_space  # before the first character that is no space
        self._in_word = False

    @property
    def is_in_word(self) -> bool:
        """Whether the text so far ends within a word, where spaces are merged."""
        return self._in_word

    def push_each(self, texts: list[str]) -> list[str]:
        """As `push`, for several parts."""
        written = []
        for text in texts:
            if self._merges and len(text) == 1 and text != " ":  # as nearly all characters are
                written.append(text if self._in_word else SPACE + text)
                self._in_word = True
            else:
                written.append(self.push(text))
        return written

    def push(self, text: str) -> str:
        """Return the next part with its spaces written."""
        if not text:
            return ""
        if self._merges:
            words = text.split(" ")
            begin = "" if self._in_word or not words[0] else SPACE
            self._in_word = bool(words[-1])
            return begin + words[0] + "".join([SPACE + word for word in words[1:] if word])
        if self._needs_prefix and (rest := text.lstrip(" ")):
            text = text[: len(text) - len(rest)] + SPACE + rest
            self._needs_prefix = False
        return text.replace(" ", SPACE)
