"""SentencePiece BPE with scores: the `llama` vocabularies of GGUF files, with the token ids of llama.cpp.

Spaces are written as U+2581, and the text after a special token begins with one more (`add_space_prefix`).  Of all
pairs of neighbours whose concatenation is a token, the one with the highest score is merged first, and of equal scores
the leftmost.  A character that is no token becomes the tokens of its bytes, or the unknown token.

Merges are exact and local: no merge crosses a place where the two characters beside it are neighbours in no token.
What is between such places is merged on its own.  These words begin, as a rule, with the space of a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.models.key_table import KeyTable
from pipeline.models.vocabularies import SPACE
from pipeline.models.vocabulary_tables import NAMED, Tables
from stages.tokenizer.borders import Borders
from stages.tokenizer.chunked_encode import RunTooLong, SpecialTokenFinder
from stages.tokenizer.pair_merger import PairMerger
from stages.tokenizer.token_table import TokenTable
from stages.tokenizer.word_encoder import WordEncoder

MAX_RUN = 1 << 18  # characters without a place that no merge crosses; merging them takes about a second
_WINDOW = 16_384  # characters: some ms; new words of a window are merged together, so that small ones are slow
_NAME = "\ud800"  # begins a word that stands for a special token: no text has it
_NO_TOKEN = 1 << 30  # above all symbols of the tables; and the code point of a character in no token


class SentencePieceEncoder:
    """Implements `vocabulary.Encoder`."""

    adds_bos = True
    may_drop = False

    def __init__(self, tables: Tables, unknown: int, adds_space: bool) -> None:
        """Raises `KeyError`, `ValueError` for tables of another kind."""
        self._prefix = SPACE if adds_space else ""
        self._unknown = unknown
        self.token_bytes = TokenTable(tables)
        self._size = len(self.token_bytes)
        self._byte_ids: list[int] = tables["byte_ids"].tolist()
        self._has_bytes = min(self._byte_ids) >= 0
        self._is_special = np.isin(tables["types"], NAMED)
        self._lengths, self._n_characters = self.token_bytes.lengths, tables["n_characters"]
        self.holes: frozenset[int] = frozenset()
        self._codes, self._code_symbols = tables["codes"], tables["code_symbols"].astype(np.int64)
        is_no_token = self._code_symbols >= self._size
        no_tokens = zip(self._code_symbols[is_no_token].tolist(), self._codes[is_no_token].tolist())
        self._texts = {symbol: chr(code) for symbol, code in no_tokens}
        self._borders = Borders(KeyTable(tables["borders"], tables["border_slots"]))
        merger = PairMerger(KeyTable(tables["pairs"], tables["pair_slots"]), tables["merged"], tables["ranks"])
        self._encoder = WordEncoder(self, merger)

    # ---------------------------------------------------------------- word_encoder.Symbols

    def whole(self, word: str) -> tuple[int, ...] | None:
        """Names of special tokens; all other words are merged."""
        return (int(word[1:]),) if word[0] == _NAME else None

    def split(self, words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The symbols of characters."""
        counts = np.fromiter(map(len, words), np.int64, len(words))
        codes = np.frombuffer("".join(words).encode("utf-32-le"), "<u4").astype(np.int64)
        if not len(self._codes):
            return codes + _NO_TOKEN, counts
        at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.where(self._codes[at] == codes, self._code_symbols[at], codes + _NO_TOKEN), counts

    def to_ids(self, symbols: Sequence[int]) -> tuple[int, ...]:
        """A character that is no token has the tokens of its bytes, or the unknown token."""
        if max(symbols) < self._size:
            return tuple(symbols)
        ids: list[int] = []
        for symbol in symbols:
            if symbol < self._size:
                ids.append(symbol)
            elif self._has_bytes:
                text = self._texts.get(symbol) or chr(symbol - _NO_TOKEN)
                ids += [self._byte_ids[byte] for byte in text.encode()]
            else:
                ids.append(self._unknown)
        return tuple(ids)

    # ---------------------------------------------------------------- encoding

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`. A chunk may be empty: a word was longer than the window, or takes several steps."""
        window = min(window, _WINDOW)
        at, size, prefix = 0, window, self._prefix
        while at < len(text):
            limit = min(at + size, len(text))
            parts: list[str] = []  # between names
            ids_after: list[int] = []  # of the name behind each part; -1: none
            place = at
            while place < limit:
                name = names.find(text, place, limit)
                end = name[0] if name is not None else limit
                parts.append(prefix + text[place:end] if end > place else "")
                begin, own_prefix = place, prefix  # of the last part
                if name is not None:
                    place, prefix = name[1], self._prefix
                    ids_after.append(name[2])
                else:
                    place, prefix = limit, ""
                    ids_after.append(-1)
            words, last = self._cut(parts, ids_after)
            if ids_after[-1] < 0 and limit < len(text):
                # The text after the window may belong to the last word.
                last.pop()
                taken = sum(map(len, last))
                place = begin + taken - len(own_prefix) if taken else begin
                prefix = "" if taken else own_prefix
            words += last
            if size > MAX_RUN and words and len(longest := max(words, key=len)) > MAX_RUN:
                raise _too_long(len(longest))
            if place > at:
                size = window
            else:
                size *= 2
                if size > 2 * MAX_RUN + window:
                    raise _too_long(size // 2)
            at = place
            steps = self._encoder.encode(words)
            while True:
                try:
                    next(steps)
                except StopIteration as done:
                    yield at, done.value
                    break
                yield at, []

    def _cut(self, parts: list[str], ids_after: list[int]) -> tuple[list[str], list[str]]:
        """Return what is between the places that no merge crosses, with the names; that of the last part on its own."""
        text = "".join(parts).replace(" ", SPACE)
        is_border = np.ones(len(text) + 1, bool)
        is_border[1:-1] = self._borders.find(text)
        part_ends = np.cumsum([len(part) for part in parts])
        is_border[part_ends] = True
        ends = np.flatnonzero(is_border)
        n_words = np.searchsorted(ends, part_ends).tolist()  # up to the end of each part
        places = ends.tolist()
        words = list(map(text.__getitem__, map(slice, places, places[1:])))
        if len(parts) == 1 and ids_after[0] < 0:
            return [], words
        all_words: list[str] = []
        first = 0
        for last, name in zip(n_words, ids_after):
            if name < 0:
                return all_words, words[first:]
            all_words += words[first:last]
            all_words.append(_NAME + str(name))
            first = last
        return all_words, []

    # ---------------------------------------------------------------- offsets

    def lengths(self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `Encoder.lengths`: the space that was added before a text belongs to no byte of it."""
        lengths = self._lengths[tokens]
        is_plain = SPACE not in text
        at, index = 0, 0  # in the text; among the tokens
        while at < len(text):
            name = names.find(text, at, len(text))
            end = name[0] if name is not None else len(text)
            if end > at:
                if name is None and is_plain and not self._is_special[tokens[index:]].any():
                    lengths[index] -= len(self._prefix)
                    return lengths
                index = self._measure(text[at:end], tokens, index, lengths)
            at = end
            if name is not None:
                at, index = name[1], index + 1
        return lengths

    def _measure(self, text: str, tokens: NDArray[np.int64], index: int, lengths: NDArray[np.int64]) -> int:
        """Set the lengths of the tokens of a text from `index` on, and return the index after them."""
        sizes = [len(character.encode()) for character in text]  # of the characters that tokens are made of
        if self._prefix:
            sizes.insert(0, 0)
        at, part = 0, 0  # the character, and how many of its bytes have been covered
        byte_ids = set(self._byte_ids)
        while at < len(sizes):
            token = int(tokens[index])
            if token in byte_ids and self._has_bytes:
                lengths[index] = 1
                part += 1
                if part == sizes[at]:
                    at, part = at + 1, 0
            else:
                n = 1 if token == self._unknown else int(self._n_characters[token])
                lengths[index] = sum(sizes[at : at + n])
                at += n
            index += 1
        return index

    # ---------------------------------------------------------------- decoding

    def shown(self, tokens: Iterable[int], is_first: bool) -> tuple[list[bytes], bool]:
        """As `Encoder.shown`: without the space that encoding has added."""
        pieces, special = self.token_bytes, self._is_special
        if not self._prefix:
            return [pieces[token] for token in tokens], False
        parts = []
        for token in tokens:
            piece = pieces[token]
            if special[token]:
                is_first = True
            elif is_first:
                piece = piece.removeprefix(b" ")
                is_first = False
            parts.append(piece)
        return parts, is_first


def _too_long(n: int) -> RunTooLong:
    return RunTooLong(f"{n} characters without a border between words, more than the tokenizer can process")
