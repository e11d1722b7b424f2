"""SentencePiece BPE with scores: the `llama` vocabularies of GGUF files, with the token ids of llama.cpp.

Spaces are written as U+2581, and the text after a special token begins with one more (`add_space_prefix`).  Of all
pairs of neighbours whose concatenation is a token, the one with the highest score is merged first, and of equal scores
the leftmost.  A character that is no token becomes the tokens of its bytes, or the unknown token.

Merges are exact and local: no merge crosses a place where the two characters beside it are neighbours in no token.
What is between such places is merged on its own.  These words begin, as a rule, with the space of a word.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.models.key_table import KeyTable
from pipeline.models.vocabularies import SPACE
from pipeline.models.vocabulary_tables import NAMED, Tables
from stages.tokenizer.borders import Borders
from stages.tokenizer.chunked_encode import Name, RunTooLong, SpecialTokenFinder, part_windows
from stages.tokenizer.covered import byte_sizes
from stages.tokenizer.pair_merger import PairMerger
from stages.tokenizer.steps import each_step
from stages.tokenizer.token_table import TokenTable
from stages.tokenizer.word_encoder import WordEncoder

MAX_RUN = 1 << 18  # characters without a place that no merge crosses; the kernel merges them in a tenth of a second
_WINDOW = 16_384  # characters: some ms; new words of a window are merged together, so that small ones are slow
_MEASURED = 16_384  # tokens whose characters are counted in a step: some ms
_NAME = "\ud800"  # begins a word that stands for a special token: no text has it
_NAME_PLACE = "\0"  # in a text that is cut
_COMMON = 0x3000  # code points whose symbols are not searched for: most of those of alphabets
_MAX_KNOWN = 1 << 14  # characters that are no token whose ids are remembered; some 2 MB
_NO_TOKEN = 1 << 30  # above all symbols of the tables; and the code point of a character in no token


@dataclass
class _Cut:
    """A text cut into words."""

    text: str
    codes: NDArray[np.uint32]
    ends: NDArray[np.int64]  # of words
    names: NDArray[np.int64]  # the characters that stand for names of special tokens, each a word
    tokens: list[int]  # of the names

    def drop_last(self, length: int) -> int:
        """Remove the last word; returns how many of the last `length` characters are left."""
        self.ends = self.ends[:-1]
        return length - (len(self.codes) - (int(self.ends[-1]) if len(self.ends) else 0))

    def longest(self) -> int:
        """Characters of the longest word; 0: there is none."""
        return int(np.diff(self.ends, prepend=0).max(initial=0))

    def words(self) -> list[str]:
        """The words; of a name `_NAME` and its token."""
        places = self.ends.tolist()
        words = list(map(self.text.__getitem__, map(slice, [0, *places], places)))
        for word, token in zip(np.searchsorted(self.ends, self.names, "right").tolist(), self.tokens):
            words[word] = _NAME + str(token)
        return words


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
        self._ids_of_bytes = frozenset(self._byte_ids) if self._has_bytes else frozenset()
        self._is_special = np.isin(tables["types"], NAMED)
        self._lengths, self._n_characters = self.token_bytes.lengths, tables["n_characters"]
        self.holes: frozenset[int] = frozenset()
        self._codes, self._code_symbols = tables["codes"], tables["code_symbols"].astype(np.int64)
        self._common = self._search(np.arange(_COMMON, dtype=np.uint32))
        is_no_token = self._code_symbols >= self._size
        no_tokens = zip(self._code_symbols[is_no_token].tolist(), self._codes[is_no_token].tolist())
        self._texts = {symbol: chr(code) for symbol, code in no_tokens}
        self._known_ids: dict[int, tuple[int, ...]] = {}  # of characters that are no token
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
        codes = np.frombuffer("".join(words).encode("utf-32-le"), "<u4")
        return self._symbols(codes).astype(np.int64), counts

    def _symbols(self, codes: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Return the symbols of characters."""
        symbols = self._common[np.minimum(codes, len(self._common) - 1)]
        others = np.flatnonzero(codes >= len(self._common))
        if len(others):
            symbols[others] = self._search(codes[others])
        return symbols

    def _search(self, codes: NDArray[np.uint32]) -> NDArray[np.int32]:
        own = codes.astype(np.int32) + np.int32(_NO_TOKEN)
        if not len(self._codes):
            return own
        at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.where(self._codes[at] == codes, self._code_symbols[at], own).astype(np.int32)

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
            limit = names.stripping.window_end(text, min(at + size, len(text)))
            found = names.find_all(text, at, limit)
            parts: list[str] = []  # what is between names, and behind each the place of a name
            place = at
            for begin, end, _ in found:
                parts += (prefix + text[place:begin] if begin > place else "", _NAME_PLACE)
                place, prefix = end, self._prefix
            is_open = place < limit < len(text)  # the text after the window may belong to the last word
            if place < limit:
                parts.append(prefix + text[place:limit])
            cut = self._cut(parts, [token for _, _, token in found])
            if is_open:
                taken = cut.drop_last(len(parts[-1]))
                place, prefix = (place + taken - len(prefix), "") if taken else (place, prefix)
            elif place < limit:
                place, prefix = limit, ""
            # White space makes a window longer than `size`, and the added space makes a word longer than the window.
            if limit - at >= MAX_RUN and (longest := cut.longest()) > MAX_RUN:
                raise _too_long(longest)
            if place > at:
                size = window
            elif limit - at > MAX_RUN:  # all of it is one word
                raise _too_long(limit - at)
            else:
                size *= 2
            at = place
            steps = self._encode(cut)
            ids = yield from each_step(steps, at)
            yield at, ids

    def _cut(self, parts: list[str], tokens: list[int]) -> _Cut:
        """Cut parts where no merge crosses, and at their ends. `tokens`: of the names among the parts."""
        text = "".join(parts).replace(" ", SPACE)
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        is_border = np.ones(len(text) + 1, bool)
        is_border[1:-1] = self._borders.find_codes(codes)
        part_ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
        is_border[part_ends] = True
        # Each name is behind one part of the text.
        return _Cut(text, codes, np.flatnonzero(is_border)[1:], part_ends[1 : 2 * len(tokens) : 2] - 1, tokens)

    def _encode(self, cut: _Cut) -> Generator[None, None, list[int]]:
        """Return the ids of words. Yields between the steps of long ones."""
        if not self._encoder.is_compiled:
            return (yield from self._encoder.encode(cut.words()))
        if not len(cut.ends):
            return []
        symbols = self._symbols(cut.codes[: cut.ends[-1]])
        symbols[cut.names] = cut.tokens
        merged, _ = yield from self._encoder.merge(symbols, cut.ends)
        symbols_left: list[int] = merged.tolist()
        ids: list[int] = []
        at = 0
        for place in np.flatnonzero(merged >= self._size).tolist():  # of characters that are no token: as a rule few
            ids += symbols_left[at:place]
            symbol = symbols_left[place]
            known = self._known_ids.get(symbol)
            if known is None:
                known = self.to_ids((symbol,))
                if len(self._known_ids) >= _MAX_KNOWN:
                    self._known_ids = {}
                self._known_ids[symbol] = known
            ids += known
            at = place + 1
        return ids + symbols_left[at:] if ids else symbols_left[at:]

    # ---------------------------------------------------------------- offsets

    def lengths(
        self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]
    ) -> Generator[None, None, NDArray[np.int64]]:
        """As `Encoder.lengths`: the space that was added before a text belongs to no byte of it."""
        lengths = self._lengths[tokens]
        found: list[Name] = []
        for parts in part_windows(names, text, _WINDOW):
            found += [name for _, _, name in parts if name is not None]
            yield
        at, index, paused = 0, 0, 0  # in the text; among the tokens
        for begin, end, _ in found:
            if at < begin:
                index = yield from self._measure(text[at:begin], tokens, index, lengths)
            at = end
            lengths[index] = len(text[begin:end].encode())  # with the white space that belongs to it
            index += 1
            if index - paused >= _MEASURED:
                paused = index
                yield
        if at < len(text):
            if SPACE not in text and not self._is_special[tokens[index:]].any():
                lengths[index] -= len(self._prefix)
            else:
                yield from self._measure(text[at:], tokens, index, lengths)
        return lengths

    def _measure(
        self, text: str, tokens: NDArray[np.int64], index: int, lengths: NDArray[np.int64]
    ) -> Generator[None, None, int]:
        """Set the lengths of the tokens of a text from `index` on, and return the index after them."""
        # Of the characters that tokens are made of.
        sizes = bytes(len(self._prefix)) + byte_sizes(text).tobytes()
        at, part = 0, 0  # the character, and how many of its bytes have been covered
        first = index
        while at < len(sizes):
            token = int(tokens[index])
            if token in self._ids_of_bytes:
                lengths[index] = 1
                part += 1
                if part == sizes[at]:
                    at, part = at + 1, 0
            else:
                n = 1 if token == self._unknown else int(self._n_characters[token])
                lengths[index] = sum(sizes[at : at + n])
                at += n
            index += 1
            if (index - first) % _MEASURED == 0:
                yield
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
