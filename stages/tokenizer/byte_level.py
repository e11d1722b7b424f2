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
from stages.tokenizer.chunked_encode import (
    WINDOW,
    Placed,
    SpecialTokenFinder,
    cut_pieces,
    encode_chunks,
    part_windows,
)
from stages.tokenizer.covered import byte_sizes
from stages.tokenizer.pair_merger import PairMerger
from stages.tokenizer.piece_pattern import piece_pattern
from stages.tokenizer.token_table import TokenTable
from stages.tokenizer.whole_pieces import WholePieces
from stages.tokenizer.word_encoder import WordEncoder

FEW_WORDS = 32  # for which the kernel is not called,
FEW_CHARACTERS = 512  # unless they are longer than this together


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
        self._whole = WholePieces(self._find_whole, int(self._lengths.max(initial=0))) if pre.whole_pieces else None
        self._pattern = piece_pattern(pre)

    # ---------------------------------------------------------------- word_encoder.Symbols

    def whole(self, word: str) -> tuple[int, ...] | None:
        """A piece that is itself a token, where pieces are not merged."""
        if self._words is None:
            return None
        data = word.encode()
        return self._whole_at(data, self._words.find_one(xxhash.xxh3_64_intdigest(data)))

    def _whole_at(self, data: bytes, entry: int) -> tuple[int, ...] | None:
        """The token that a piece is, by the entry of its hash; an entry below 0 is none."""
        if entry < 0:
            return None
        token = int(self._word_ids[entry])
        return (token,) if self.token_bytes[token] == data or self._odd_words.get(data) == token else None

    def _find_whole(self, pieces: list[str]) -> dict[str, tuple[int, ...]]:
        """The tokens that pieces are: none of those that are no token."""
        assert self._words is not None
        encoded = [piece.encode() for piece in pieces]
        hashes = np.array([xxhash.xxh3_64_intdigest(data) for data in encoded], np.uint64)
        entries = self._words.find(hashes).tolist()
        return {piece: self._whole_at(data, at) or () for piece, data, at in zip(pieces, encoded, entries)}

    def split(self, words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The symbols of bytes."""
        encoded = [word.encode() for word in words]
        counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return self._symbols[np.frombuffer(b"".join(encoded), np.uint8)], counts

    def to_ids(self, symbols: Sequence[int]) -> tuple[int, ...]:
        """Symbols are token ids; bytes without a token are dropped."""
        return tuple([symbol for symbol in symbols if symbol >= 0]) if self.holes else tuple(symbols)

    def _encode(self, text: str, lengths: list[int], names: Placed) -> Generator[None, None, list[int]]:
        """Return the ids of the first pieces of a text, which have these numbers of characters, and of names."""
        # A call of the kernel costs as much as many known words: short texts have few.
        is_small = len(lengths) <= FEW_WORDS and sum(lengths) <= FEW_CHARACTERS
        if is_small or not self._encoder.is_compiled:
            return (yield from self._encode_words(cut_pieces(text, lengths), names))
        character_ends = np.cumsum(np.fromiter(lengths, np.int64, len(lengths)))
        text = text[: int(character_ends[-1])]
        ends = character_ends if text.isascii() else _byte_ends(text)[character_ends - 1]
        symbols = self._symbols_of[np.frombuffer(text.encode(), np.uint8)]
        if names:
            # Each name is a piece of one symbol, its token, and of no characters.
            places, tokens = np.array(names, np.int64).T
            symbols = np.insert(symbols, np.append(0, ends)[places], tokens)
            ends = np.cumsum(np.insert(np.diff(ends, prepend=0), places, 1))
            character_ends = np.insert(character_ends, places, np.append(0, character_ends)[places])
        merged, merged_ends = yield from self._encoder.merge(symbols, ends)
        if self._whole is not None:
            merged = yield from self._whole.put(merged, merged_ends, text, character_ends)
        ids: list[int] = (merged[merged >= 0] if self.holes else merged).tolist()
        return ids

    def _encode_words(self, pieces: list[str], names: Placed) -> Generator[None, None, list[int]]:
        """Return the ids of pieces and of names between them, without the kernel."""
        ids: list[int] = []
        at = 0
        for before, token in names:
            if at < before:
                ids += yield from self._encoder.encode(pieces[at:before])
            ids.append(token)
            at = before
        if at < len(pieces):
            ids += yield from self._encoder.encode(pieces[at:])
        return ids

    # ---------------------------------------------------------------- vocabulary.Encoder

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`."""
        return encode_chunks(self._pattern.lengths, self._encode, names, text, window, self._groups_from_right)

    def lengths(
        self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]
    ) -> Generator[None, None, NDArray[np.int64]]:
        """As `Encoder.lengths`."""
        lengths = self._lengths[tokens]
        if not names.stripping:
            return lengths
        ids, index = tokens.tolist(), 0
        for parts in part_windows(names, text, WINDOW):
            for begin, end, token in [name for _, _, name in parts if name is not None]:
                index = ids.index(token, index)
                # The name has the bytes of its token; what is beside it is white space.
                beside = b"".join(text[begin:end].encode().split(self.token_bytes[token], 1))
                lengths[index] += sum(byte not in self.holes for byte in beside)
                index += 1
            yield
        return lengths

    def shown(self, tokens: Iterable[int], is_first: bool) -> tuple[list[bytes], bool]:
        """As `Encoder.shown`: the tokens' bytes."""
        pieces = self.token_bytes
        return [pieces[token] for token in tokens], False


def _byte_ends(text: str) -> NDArray[np.int64]:
    """Return where the bytes of each character end."""
    return np.cumsum(byte_sizes(text), dtype=np.int64)
