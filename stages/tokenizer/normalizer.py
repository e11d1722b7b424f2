"""Normalizes texts as SentencePiece's unigram vocabularies ask for: characters are replaced, then spaces merged.

A text may come in parts.  Of several texts to replace at one place the longest counts, from left to right; so all but
the end of a part is certain before the next one is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.models.charsmap import LONGEST, Charsmap
from pipeline.models.vocabularies import SPACE


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
        # Where one of several characters may begin: two characters of which few texts have any.
        first, second = ("".join(map(re.escape, sorted(some))) for some in (charsmap.starts, charsmap.seconds))
        self._candidate = re.compile(f"[{first}](?=[{second}])") if first else None
        self._second = re.compile(f"[{second}]") if first else None
        self.longest = LONGEST if first else 1  # characters that are replaced together

    def replaced(self, text: str, is_end: bool) -> tuple[str, int]:
        """Return the beginning of a text with its characters replaced, and how many characters of it that is.

        is_end: nothing follows the text, so that all of it is replaced.
        """
        last = len(text) if is_end else max(0, len(text) - self.longest + 1)  # matches before it are certain
        if self._second is None or self._second.search(text) is None:
            return text[:last].translate(self._single), last
        out, at = [], 0
        for begin, end, to in self._matches(text):
            if begin >= last:
                break
            out += [text[at:begin].translate(self._single), to]
            at = end
        if at < last:
            out.append(text[at:last].translate(self._single))
            at = last
        return "".join(out), at

    def _matches(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (begin, end, replacement) of each match of several characters, from left to right."""
        assert self._candidate is not None
        at = 0
        while (candidate := self._candidate.search(text, at)) is not None:
            begin = candidate.start()
            found = self._charsmap.find(text, begin)
            at = begin + 1
            if found is not None:
                at, to = found
                yield begin, at, to

    def aligned(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (begin, end, replacement) of each character, or of several that are replaced together."""
        at = 0
        matches = self._matches(text) if self._candidate is not None else iter(())
        for begin, end, to in [*matches, (len(text), len(text), "")]:
            for place in range(at, begin):
                yield place, place + 1, text[place].translate(self._single)
            if end > begin:
                yield begin, end, to
            at = end


class Spaces:
    """Writes the spaces of one text as U+2581, part by part."""

    def __init__(self, rules: Normalizer) -> None:
        self._merges = rules.merges_spaces
        self._needs_prefix = rules.adds_space  # before the first character that is no space
        self._in_word = False

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
