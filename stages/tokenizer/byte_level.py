"""Byte-level BPE: the `gpt2` vocabularies of GGUF files.

Sennrich et al. 2016; the byte alphabet of GPT-2: every byte has a printable stand-in character, tokens are strings of
stand-ins, merges are ranked pairs.  A text is cut into pieces (`piece_pattern.py`), chunk by chunk
(`chunked_encode.py`); merges never cross pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pipeline.models.key_table import KeyTable
from pipeline.models.pretokenizers import PreTokenizer
from pipeline.models.vocabulary_tables import Tables
from stages.tokenizer.chunked_encode import SpecialTokenFinder, cut_pieces, encode_chunks
from stages.tokenizer.pair_merger import PairMerger
from stages.tokenizer.piece_pattern import piece_pattern
from stages.tokenizer.token_table import TokenTable
from stages.tokenizer.whole_pieces import WholePieces
from stages.tokenizer.word_encoder import WordEncoder

FEW_WORDS = 32  # for which the kernel is not called


class ByteLevelEncoder:
    """Implements `vocabulary.Encoder`."""

    may_drop = False

    def __init__(self, tables: Tables, pre: PreTokenizer) -> None:
        """Raises `KeyError`, `ValueError` for tables of another kind."""
        self.adds_bos = pre.adds_bos
        self._groups_from_right = pre.groups_from_right
        self.token_bytes = TokenTable(tables)
        self._lengths = self.token_bytes.lengths
        self._hole = len(self.token_bytes)  # of a byte without a token, which keeps its neighbours from merging
        self._symbols = np.where(tables["symbols"] == self._hole, -1, tables["symbols"]).astype(np.int64)
        # Bytes without a token: encoding drops them, as every published tokenizer does.
        self.holes = frozenset(np.flatnonzero(self._symbols < 0).tolist())
        merger = PairMerger(KeyTable(tables["pairs"], tables["pair_slots"]), tables["merged"], tables["ranks"])
        self._words = KeyTable(tables["words"], tables["word_slots"]) if pre.whole_pieces else None
        self._word_ids = tables["word_ids"]
        self._odd_words = msgspec.msgpack.decode(tables["odd_words"].tobytes(), type=dict[bytes, int])
        self._encoder = WordEncoder(self, merger)
        self._symbols_of = self._symbols.astype(np.int32)
        self._whole = WholePieces(self.whole, int(self._lengths.max(initial=0))) if pre.whole_pieces else None
        self._pattern = piece_pattern(pre)

    # ---------------------------------------------------------------- word_encoder.Symbols

    def whole(self, word: str) -> tuple[int, ...] | None:
        """A piece that is itself a token, where pieces are not merged."""
        if self._words is None:
            return None
        data = word.encode()
        entry = self._words.find_one(xxhash.xxh3_64_intdigest(data))
        if entry < 0:
            return None
        token = int(self._word_ids[entry])
        return (token,) if self.token_bytes[token] == data or self._odd_words.get(data) == token else None

    def split(self, words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The symbols of bytes."""
        encoded = [word.encode() for word in words]
        counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return self._symbols[np.frombuffer(b"".join(encoded), np.uint8)], counts

    def to_ids(self, symbols: Sequence[int]) -> tuple[int, ...]:
        """Symbols are token ids; bytes without a token are dropped."""
        return tuple([symbol for symbol in symbols if symbol >= 0]) if self.holes else tuple(symbols)

    def _encode(self, text: str, lengths: list[int]) -> Generator[None, None, list[int]]:
        """Return the ids of the first pieces of a text, which have these numbers of characters."""
        # A call of the kernel costs as much as many known words; between names of tokens there are often few.
        if len(lengths) <= FEW_WORDS or not self._encoder.is_compiled:
            return (yield from self._encoder.encode(cut_pieces(text, lengths)))
        if not lengths:
            return []
        character_ends = np.cumsum(np.fromiter(lengths, np.int64, len(lengths)))
        text = text[: int(character_ends[-1])]
        ends = character_ends if text.isascii() else _byte_ends(text)[character_ends - 1]
        symbols = self._symbols_of[np.frombuffer(text.encode(), np.uint8)]
        merged, merged_ends = yield from self._encoder.merge(symbols, ends)
        if self._whole is not None:
            merged = yield from self._whole.put(merged, merged_ends, text, character_ends)
        ids: list[int] = (merged[merged >= 0] if self.holes else merged).tolist()
        return ids

    # ---------------------------------------------------------------- vocabulary.Encoder

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`."""
        return encode_chunks(self._pattern.lengths, self._encode, names, text, window, self._groups_from_right)

    def lengths(self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `Encoder.lengths`."""
        return self._lengths[tokens]

    def shown(self, tokens: Iterable[int], is_first: bool) -> tuple[list[bytes], bool]:
        """As `Encoder.shown`: the tokens' bytes."""
        pieces = self.token_bytes
        return [pieces[token] for token in tokens], False


def _byte_ends(text: str) -> NDArray[np.int64]:
    """Return where the bytes of each character end."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.cumsum(sizes)
