"""WordPiece: the `bert` vocabularies of GGUF files, with the token ids of llama.cpp.

Characters lose their accents and capitals; white space separates words; a mark of punctuation, an ASCII symbol or a
Chinese character is a word of its own; control characters and combining marks are dropped.  A word, with U+2581 in
front, is cut from its beginning into the longest tokens that fit.  A word of which a part is no token is the unknown
token.

Normalization loses characters, so that the text of some tokens is not the text that they were made of.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pipeline.models.token_trie import END, TokenTrie
from pipeline.models.vocabularies import SPACE
from pipeline.models.vocabulary_tables import NAMED, Tables
from stages.tokenizer.chunked_encode import RunTooLong, SpecialTokenFinder, part_windows
from stages.tokenizer.covered import Ends, covered_bytes
from stages.tokenizer.kernels.word_cutter import WordCutter
from stages.tokenizer.steps import each_step
from stages.tokenizer.token_table import TokenTable
from stages.tokenizer.word_cache import Ids, WordCache
from stages.tokenizer.wordpiece_characters import WHITE_SPACE, normalized

MAX_WORD = 1 << 18  # characters
_WINDOW = 16_384  # characters: some ms
_FEW = 512  # characters of a text for which the kernel is not called: its words may be cached
_BETWEEN = "\ud800"  # between parts of a text: no text has it
Cut = list[tuple[int, int]]  # the tokens of a word, and where each ends in it
_DROPPED = "\x1c\x1d\x1e\x1f"  # control characters that Python takes for white space


class _Normalizer(dict[int, str]):
    """For `str.translate`: finds each character once."""

    def __missing__(self, code: int) -> str:
        found = self[code] = normalized(chr(code))
        return found


class WordPieceEncoder:
    """Implements `vocabulary.Encoder`."""

    adds_bos = True
    may_drop = True

    def __init__(self, tables: Tables, unknown: int) -> None:
        """Raises `KeyError`, `ValueError` for tables of another kind."""
        self._unknown = unknown
        self.token_bytes = TokenTable(tables)
        self._trie = TokenTrie(tables["trie"], tables["trie_slots"], tables["trie_tokens"])
        self._compiled = WordCutter.find(self._trie, len(self.token_bytes), unknown=unknown)
        self._is_special = np.isin(tables["types"], NAMED)
        self.holes: frozenset[int] = frozenset()
        self._normalizer = _Normalizer({ord(_BETWEEN): _BETWEEN})
        self._written = WordCache(self._encode_written)  # what is between white space
        self._words = WordCache(self._encode_words)  # normalized

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
            part = text[at:end]
            for character in _DROPPED:
                part = part.replace(character, "")
            steps = self._encode(part)
            at, size = end, window
            ids = yield from each_step(steps, at)
            if name is not None:
                at = name[1]
                ids.append(name[2])
            yield at, ids

    def _encode(self, text: str) -> Generator[None, None, list[int]]:
        """Return the ids of a text without names."""
        if len(text) <= _FEW or self._compiled is None:
            return (yield from self._written.encode(text.split()))
        cuts = yield from self._compiled.cut(text.translate(self._normalizer).split(), SPACE)
        ids: list[int] = cuts.ids.tolist()
        return ids

    def _encode_written(self, parts: list[str]) -> Generator[None, None, dict[str, Ids]]:
        """Return the ids of parts of a text without white space."""
        normalized = _BETWEEN.join(parts).translate(self._normalizer).split(_BETWEEN)
        words = [text.split() for text in normalized]
        found = yield from self._words.find(list(chain.from_iterable(words)))
        return {part: tuple(chain.from_iterable(map(found.__getitem__, some))) for part, some in zip(parts, words)}

    def _encode_words(self, words: list[str]) -> Generator[None, None, dict[str, Ids]]:
        """Return the ids of normalized words."""
        cuts = yield from self._cut_steps(words)
        return {word: tuple([i for i, _ in cut]) for word, cut in zip(words, cuts)}

    def _cut_steps(self, words: list[str]) -> Generator[None, None, list[Cut]]:
        """Return the tokens of normalized words, and their ends in it, with U+2581 in front. Yields between steps."""
        if self._compiled is not None:
            return (yield from self._compiled.cut(words, SPACE)).pairs_of_words()
        cuts: list[Cut] = []
        while len(cuts) < len(words):
            size, begin, end = 0, len(cuts), len(cuts)
            while end < len(words) and size < _WINDOW:
                size += len(words[end])
                end += 1
            some = words[begin:end]
            cuts += [cut or [(self._unknown, len(word) + 1)] for word, cut in zip(some, self._cut(some))]
            if end < len(words):
                yield
        return cuts

    def _cut(self, words: Sequence[str]) -> list[Cut]:
        """Return the longest tokens of each word one after the other, and their ends in it, with U+2581 in front.

        A word of which a part is no token has none.
        """
        if not words:
            return []
        codes = np.frombuffer((SPACE + f"\n{SPACE}".join(words) + "\n").encode("utf-32-le"), "<u4").astype(np.uint64)
        ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)) + 2) - 1
        codes[ends] = END
        lengths, ids = np.zeros(len(codes), np.int64), np.zeros(len(codes), np.int64)  # of the longest at each place
        for places, length, found in self._trie.matches(codes):
            lengths[places], ids[places] = length, found
        longest, tokens, begin = lengths.tolist(), ids.tolist(), 0
        cuts = []
        for end in ends.tolist():
            cut: Cut = []
            at = begin
            while at < end and longest[at]:
                cut.append((tokens[at], at + longest[at] - begin))
                at += longest[at]
            cuts.append(cut if at == end else [])
            begin = end + 1
        return cuts

    # ---------------------------------------------------------------- offsets

    def lengths(
        self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]
    ) -> Generator[None, None, NDArray[np.int64]]:
        """As `Encoder.lengths`: what is before a token and belongs to none counts for it, at the end for the last."""
        return covered_bytes(text, len(tokens), self._ends(names, text))

    def _ends(self, names: SpecialTokenFinder, text: str) -> Ends:
        """Yield where the tokens of a text end: of its words, and of names."""
        rest = ""  # of a word that may go on, normalized
        places = np.zeros(0, np.int64)  # behind the character that each normalized one was made of
        for parts in part_windows(names, text, _WINDOW):
            named = [name for _, _, name in parts if name is not None]
            at, stop = parts[0][0], named[-1][1] if parts[-1][2] is not None else parts[-1][1]
            # A name ends a word, as a space does.
            written = "".join([text[i:j] + (" " * (name[1] - j) if name is not None else "") for i, j, name in parts])
            became = list(map(self._normalizer.__getitem__, map(ord, written)))
            counts = np.fromiter(map(len, became), np.int64, len(became))
            places = np.append(places, np.repeat(np.arange(at + 1, stop + 1), counts))
            rest += "".join(became)
            end = len(rest) if stop == len(text) else rest.rfind(" ") + 1
            words = rest[:end].split(" ")
            letters = places[:end][np.frombuffer(rest[:end].encode("utf-32-le"), "<u4") != ord(" ")].tolist()
            rest, places = rest[end:], places[end:]
            words = list(filter(None, words))
            cuts = yield from each_step(self._cut_steps(words), stop)
            ends, first = [name[1] for name in named], 0
            for word, cut in zip(words, cuts):
                # The token of U+2581 alone ends where the word begins.
                ends += [letters[first + i - 2] if i > 1 else letters[first] - 1 for _, i in cut]
                first += len(word)
            yield stop, sorted(ends)

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
        if text[at - 1] in WHITE_SPACE:
            return at
    return begin
