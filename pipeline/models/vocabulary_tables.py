"""The compiled form of a vocabulary: arrays that the tokenizer maps from the `.idx` and uses as they are.

    pieces, ends           the bytes of all tokens one after the other, and where each ends (u32)
    types                  of each token (u8), as in the GGUF specification
    names                  msgpack: the texts of control, unknown and user-defined tokens in the order of their ids
    weights                i64 (256,): what each byte weighs in the lower bound of a token count (`byte_weights`)
    pairs, pair_slots      the symbols that merge, left << 32 | right (`key_table.py`)
    merged, ranks          i32: what each pair becomes, and which pair comes first
    symbols                byte-level: i32 (256,), the symbol of each byte; as many as tokens: the byte has none
    words, word_slots      byte-level: the XXH3-64 of texts that are one token
    word_ids               byte-level: i32, their tokens; `odd_words` (msgpack): those whose bytes are written otherwise
    codes, code_symbols    SentencePiece: i32, the characters of all tokens in order, and their symbols; one that is no
                           token has a symbol above all tokens
    borders, border_slots  SentencePiece: neighbours in a token, one << 32 | other; no token crosses other places
    byte_ids               SentencePiece: i32 (256,), the token of each byte, -1: none
    n_characters           SentencePiece: i32, of each token's text
    trie, trie_slots       unigram and WordPiece: the texts of the tokens that a text may become (`token_trie.py`)
    trie_tokens            unigram and WordPiece: i32, the token of each node
    scores                 unigram: f32, of each token
    borders, border_slots  unigram: as of SentencePiece
    inner_spaces           unigram: u64, those of `borders` that have a space behind another character
    charsmap_...           unigram: replacements of characters (`charsmap.py`)

A symbol is a token id, or stands for what no token has.  Unigram and WordPiece have neither pairs nor symbols.  The
tables depend on the file alone: not on its pre-tokenizer, nor on a Unicode version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pipeline.models.charsmap import read_charsmap
from pipeline.models.key_table import make_slots
from pipeline.models.token_trie import make_trie
from pipeline.models.vocabularies import (
    BYTE,
    BYTE_LEVEL,
    CONTROL,
    NORMAL,
    SENTENCEPIECE,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    WORDPIECE,
    byte_name,
)

Tables = Mapping[str, NDArray[Any]]
NAMED = (CONTROL, UNKNOWN, USER_DEFINED)  # types of the tokens in `names`
ONE = 1 << 32  # the weight of a token; the weights of bytes are rounded down, so that a sum is never too large


class VocabularyLists(Protocol):
    """What tables are made from; as `TokenizerData`, checked by `vocabulary_problem`."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def tokens(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def types(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def merges(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def scores(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def charsmap(self) -> bytes: ...  # noqa: D102


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's stand-in characters: printable Latin-1 for themselves, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def byte_weights(tokens: Sequence[bytes], holes: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return for each byte `ONE` divided by the length of the longest token that has it; 0: in none, or in `holes`."""
    lengths = np.array([len(token) for token in tokens], np.int64)
    longest = np.zeros(256, np.int64)
    np.maximum.at(longest, np.frombuffer(b"".join(tokens), np.uint8), np.repeat(lengths, lengths))
    longest[list(holes)] = 0
    return np.where(longest > 0, ONE // np.maximum(longest, 1), 0)


def make_tables(data: VocabularyLists) -> dict[str, NDArray[Any]]:
    """Compile a vocabulary; no tables for a kind that is not known."""
    compilers = {BYTE_LEVEL: _byte_level, SENTENCEPIECE: _sentencepiece, UNIGRAM: _unigram, WORDPIECE: _wordpiece}
    return compilers[data.model](data) if data.model in compilers else {}


def _common(data: VocabularyLists, types: Sequence[int], token_bytes: list[bytes]) -> dict[str, NDArray[Any]]:
    names = [text for text, kind in zip(data.tokens, types) if kind in NAMED]
    lengths = np.fromiter(map(len, token_bytes), np.int64, len(token_bytes))
    return {
        "pieces": np.frombuffer(b"".join(token_bytes), np.uint8),
        "ends": np.cumsum(lengths).astype("<u4"),
        # A type that is none of the specification's counts as a normal token that text never becomes part of.
        "types": np.array([kind if 0 <= kind < 256 else 0 for kind in types], np.uint8),
        "names": np.frombuffer(msgspec.msgpack.encode(names), np.uint8),
    }


def _packed(left: Sequence[int], right: Sequence[int]) -> NDArray[np.uint64]:
    return np.array(left, np.uint64) << np.uint64(32) | np.array(right, np.uint64)


def _byte_level(data: VocabularyLists) -> dict[str, NDArray[Any]]:
    alphabet = byte_alphabet()
    to_bytes = str.maketrans({character: chr(byte) for character, byte in alphabet.items()})
    types = data.types or [NORMAL] * len(data.tokens)

    def of_bytes(text: str) -> bytes | None:
        """The bytes that a token's text stands for."""
        return text.translate(to_bytes).encode("latin-1") if alphabet.keys() >= set(text) else None

    token_bytes: list[bytes] = []
    ids: dict[str, int] = {}
    words: dict[bytes, int] = {}
    for i, (text, kind) in enumerate(zip(data.tokens, types, strict=True)):
        plain = of_bytes(text)
        written = plain if plain is not None and kind in (NORMAL, BYTE) else text.encode()
        token_bytes.append(written)
        # Text must not become a control token, also if merges or a whole piece have its name.
        if (kind not in (CONTROL, UNKNOWN) or text in alphabet) and text not in ids:
            ids[text] = i
            if plain:
                words[plain] = i
    symbols = np.full(256, len(data.tokens), np.int32)
    for character, byte in alphabet.items():
        symbols[byte] = ids.get(character, len(data.tokens))
    merges: dict[tuple[int, int], tuple[int, int]] = {}  # of equal pairs the last counts, as in `tokenizers`
    for rank, line in enumerate(data.merges):
        # The separator is the first space after at least one character: stand-ins are never spaces.
        left, space, right = line.partition(" ")
        if space and (one := ids.get(left)) is not None and (other := ids.get(right)) is not None:
            both = ids.get(left + right)
            if both is not None:
                merges[one, other] = rank, both
    pairs = _packed([one for one, _ in merges], [other for _, other in merges])
    hashes = np.array([xxhash.xxh3_64_intdigest(word) for word in words], np.uint64)
    holes = np.flatnonzero(symbols == len(data.tokens)).tolist()
    return _common(data, types, token_bytes) | {
        "weights": byte_weights(token_bytes, holes),
        "symbols": symbols,
        "pairs": pairs,
        "pair_slots": make_slots(pairs),
        "merged": np.array([both for _, both in merges.values()], np.int32),
        "ranks": np.array([rank for rank, _ in merges.values()], np.int32),
        "words": hashes,
        "word_slots": make_slots(hashes),
        "word_ids": np.array([*words.values()], np.int32),
        "odd_words": np.frombuffer(
            msgspec.msgpack.encode({word: i for word, i in words.items() if token_bytes[i] != word}), np.uint8
        ),
    }


def _sentencepiece(data: VocabularyLists) -> dict[str, NDArray[Any]]:
    types = data.types or [NORMAL] * len(data.tokens)
    n = len(data.tokens)
    # Text must not become a control token, nor a byte by its name.
    hidden = (CONTROL, UNKNOWN, BYTE)
    ids = {text: i for i, (text, kind) in enumerate(zip(data.tokens, types)) if text and kind not in hidden}
    named = {text: i for i, text in enumerate(data.tokens)}
    byte_ids = [named.get(byte_name(byte), -1) for byte in range(256)]
    for i in byte_ids:
        ids.pop(data.tokens[i] if i >= 0 else "", None)
    bytes_by_id = {i: bytes([byte]) for byte, i in enumerate(byte_ids)}
    # How a token's bytes are written: the names of special tokens as they are.
    token_bytes = [
        bytes_by_id.get(i) or (text if kind in NAMED else text.replace(SPACE, " ")).encode()
        for i, (text, kind) in enumerate(zip(data.tokens, types))
    ]
    characters = sorted({character for text in ids for character in text})
    symbols = dict(ids)
    for character in characters:
        symbols.setdefault(character, n + len(symbols))  # above all tokens, each another
    order = np.unique(-np.asarray(data.scores, np.float32), return_inverse=True)[1].tolist()
    left: list[int] = []
    right: list[int] = []
    merged: list[int] = []
    borders: set[str] = set()
    for text, i in ids.items():
        borders.update(map("".join, pairwise(text)))
        for at in range(1, len(text)):
            one = symbols.get(text[:at])
            other = symbols.get(text[at:]) if one is not None else None
            if one is not None and other is not None:
                left.append(one)
                right.append(other)
                merged.append(i)
    pairs = _packed(left, right)
    neighbours = _packed([ord(pair[0]) for pair in borders], [ord(pair[1]) for pair in borders])
    # U+2581 in a token stands for a space or for itself.
    covered = [*token_bytes]
    for text in data.tokens:
        if SPACE in text:
            covered += [text.encode(), text.replace(SPACE, " ").encode()]
    # Without byte tokens an unknown character of up to four bytes is one token.
    holes = () if min(byte_ids) >= 0 else range(0x80, 0x100)
    return _common(data, types, token_bytes) | {
        "weights": byte_weights(covered, holes),
        "pairs": pairs,
        "pair_slots": make_slots(pairs),
        "merged": np.array(merged, np.int32),
        "ranks": np.array([order[i] for i in merged], np.int32),
        "codes": np.array([ord(character) for character in characters], np.int32),
        "code_symbols": np.array([symbols[character] for character in characters], np.int32),
        "borders": neighbours,
        "border_slots": make_slots(neighbours),
        "byte_ids": np.array(byte_ids, np.int32),
        "n_characters": np.fromiter(map(len, data.tokens), np.int32, n),
    }


def _trie(data: VocabularyLists, ids: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """What unigram and WordPiece have in common. `ids`: of the tokens that a text may become."""
    types = data.types or [NORMAL] * len(data.tokens)
    token_bytes = [
        (text if kind in NAMED else text.replace(SPACE, " ")).encode() for text, kind in zip(data.tokens, types)
    ]
    keys, slots, tokens = make_trie(ids)
    # A part of a text, however long, can be one unknown token: bytes weigh nothing.
    weights = np.zeros(256, np.int64)
    tables = _common(data, types, token_bytes)
    return tables | {"weights": weights, "trie": keys, "trie_slots": slots, "trie_tokens": tokens}


def _unigram(data: VocabularyLists) -> dict[str, NDArray[Any]]:
    types = data.types or [NORMAL] * len(data.tokens)
    # Text must not become a control token, nor a byte by its name.
    hidden = (CONTROL, UNKNOWN, BYTE)
    ids = {text: i for i, (text, kind) in enumerate(zip(data.tokens, types)) if text and kind not in hidden}
    scores = np.array(data.scores, np.float32)
    scores[np.array(types) == USER_DEFINED] = 0
    codes = np.frombuffer("".join(ids).encode("utf-32-le"), "<u4").astype(np.uint64)
    neighbours = codes[:-1] << np.uint64(32) | codes[1:]
    is_inside = np.ones(len(codes), bool)
    is_inside[np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids))) - 1] = False  # behind each text
    borders = np.unique(neighbours[is_inside[:-1]])
    return (
        _trie(data, ids)
        | {
            "scores": scores,
            "borders": borders,
            "border_slots": make_slots(borders),
            "inner_spaces": borders[borders & np.uint64(0xFFFFFFFF) == ord(SPACE)],
        }
        | read_charsmap(data.charsmap).tables()
    )


def _wordpiece(data: VocabularyLists) -> dict[str, NDArray[Any]]:
    return _trie(data, {text: i for i, text in enumerate(data.tokens) if text})
