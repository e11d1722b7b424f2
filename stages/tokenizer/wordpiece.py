"""WordPiece: the `bert` vocabularies of GGUF files, with the token ids of llama.cpp.

Characters lose their accents and capitals; white space separates words; a mark of punctuation, an ASCII symbol or a
Chinese character is a word of its own; control characters and combining marks are dropped.  A word, with U+2581 in
front, is cut from its beginning into the longest tokens that fit.  A word of which a part is no token is the unknown
token.

Normalization loses characters, so that the text of some tokens is not the text that they were made of.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.models.vocabularies import CONTROL, SPACE, UNKNOWN, USER_DEFINED
from stages.tokenizer.chunked_encode import RunTooLong, SpecialTokenFinder
from stages.tokenizer.covered import covered_bytes

MAX_WORD = 1 << 18  # characters
CACHED_CHARACTERS = 32  # of a word whose ids are cached
MAX_CACHED = 1 << 16  # words; some 20 MB
_WINDOW = 8192  # characters: some ms
_WHITE_SPACE = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
)
# Blocks of Chinese characters, as llama.cpp and Hugging Face's `tokenizers` have them.
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def normalized(character: str) -> str:
    """What a character becomes: a space, nothing, a lower-case character, or one between spaces."""
    base = unicodedata.normalize("NFD", character)[0]
    if base in _WHITE_SPACE:
        return " "
    category, code = unicodedata.category(base), ord(base)
    if code in (0, 0xFFFD) or category in ("Cc", "Cf", "Co", "Cs", "Mn", "Mc", "Me"):
        return ""
    lower = base.lower()[0]
    is_word = category[0] == "P" or (code < 0x7F and category[0] == "S")
    if is_word or any(first <= code <= last for first, last in _CHINESE):
        return f" {lower} "
    return lower


class _Normalizer(dict[int, str]):
    """For `str.translate`: finds each character once."""

    def __missing__(self, code: int) -> str:
        found = self[code] = normalized(chr(code))
        return found


class WordPieceEncoder:
    """Implements `vocabulary.Encoder`."""

    adds_bos = True
    may_drop = True

    def __init__(self, tokens: Sequence[str], types: Sequence[int], unknown: int) -> None:
        self._unknown = unknown
        self._ids = {text: i for i, text in enumerate(tokens) if text}
        self._longest = max(map(len, self._ids))
        raw = (CONTROL, UNKNOWN, USER_DEFINED)
        self.token_bytes = [
            (text if kind in raw else text.replace(SPACE, " ")).encode() for text, kind in zip(tokens, types)
        ]
        self._is_special = np.array([kind in raw for kind in types], bool)
        self.holes: frozenset[int] = frozenset()
        self._normalizer = _Normalizer()
        self._cache: dict[str, list[int]] = {}

    # ---------------------------------------------------------------- encoding

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`. A chunk may be empty: a word was longer than the window."""
        window = min(window, _WINDOW)
        at, size = 0, window
        while at < len(text):
            end = min(at + size, len(text))
            name = names.find(text, at, end)
            if name is not None:
                end = name[0]
            elif end < len(text):
                end = _last_border(text, at, end)
                if end == at:
                    if size > MAX_WORD:
                        raise RunTooLong(f"{size} characters without white space, more than the tokenizer can process")
                    size *= 2
                    yield at, []
                    continue
            ids = [i for word in text[at:end].translate(self._normalizer).split(" ") if word for i in self._word(word)]
            at, size = end, window
            if name is not None:
                at = name[1]
                ids.append(name[2])
            yield at, ids

    def _word(self, word: str) -> list[int]:
        """Return the ids of a normalized word."""
        found = self._cache.get(word)
        if found is None:
            found = [i for i, _ in self._cut(SPACE + word)] or [self._unknown]
            if len(word) <= CACHED_CHARACTERS:
                if len(self._cache) >= MAX_CACHED:
                    self._cache.clear()
                self._cache[word] = found
        return found

    def _cut(self, word: str) -> list[tuple[int, int]]:
        """Return the ids of the longest tokens one after the other, and their ends; empty where one is missing."""
        ids, found, at = self._ids, [], 0
        while at < len(word):
            for end in range(min(len(word), at + self._longest), at, -1):
                token = ids.get(word[at:end])
                if token is not None:
                    found.append((token, end))
                    at = end
                    break
            else:
                return []
        return found

    # ---------------------------------------------------------------- offsets

    def lengths(self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `Encoder.lengths`: what is before a token and belongs to none counts for it, at the end for the last."""
        return covered_bytes(names, text, len(tokens), self._ends)

    def _ends(self, text: str) -> list[int]:
        """Return where the tokens of a text without names end."""
        ends: list[int] = []
        word: list[int] = []  # places behind the characters of the word
        letters: list[str] = []

        def finish() -> None:
            if letters:
                cut = self._cut(SPACE + "".join(letters))
                # The token of U+2581 alone ends where the word begins.
                ends.extend([word[end - 2] if end > 1 else word[0] - 1 for _, end in cut] or [word[-1]])
            word.clear()
            letters.clear()

        for place, character in enumerate(text):
            became = self._normalizer[ord(character)]
            if became[:1] == " ":
                finish()
            if letter := became.strip(" "):
                letters.append(letter)
                word.append(place + 1)
            if len(became) == 3:
                finish()
        finish()
        return ends

    # ---------------------------------------------------------------- decoding

    def shown(self, tokens: Iterable[int], is_first: bool) -> tuple[list[bytes], bool]:
        """As `Encoder.shown`: without the space before the first word."""
        parts = []
        for token in tokens:
            piece = self.token_bytes[token]
            if self._is_special[token]:
                is_first = True
            elif is_first:
                piece, is_first = piece.removeprefix(b" "), False
            parts.append(piece)
        return parts, is_first


def _last_border(text: str, begin: int, end: int) -> int:
    """Return the place behind the last white space in text[begin:end]; `begin` if there is none."""
    for at in range(end, begin, -1):
        if text[at - 1] in _WHITE_SPACE:
            return at
    return begin
