"""A vocabulary of a GGUF file: from text to token ids, and from ids to bytes.

Common to all kinds of vocabularies: names of special tokens, the BOS token, limits, the bytes of tokens.  How the text
between special tokens is encoded is up to the kind's encoder (`byte_level.py`, `sentencepiece.py`, `unigram.py`,
`wordpiece.py`).  The tables of `pipeline/models/vocabulary_tables.py` are mapped from the model's index, or compiled
here for an index of an older release.  Independent of requests, streams and templates.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ModelUnavailable
from pipeline.models.pretokenizers import PRETOKENIZERS
from pipeline.models.vocabularies import (
    BYTE_LEVEL,
    CONTROL,
    SENTENCEPIECE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDPIECE,
    named_ends,
    vocabulary_problem,
)
from pipeline.models.vocabulary_tables import NAMED, Tables, make_tables
from shm.checkpoint import VOCABULARY_REVISION
from stages.tokenizer.byte_level import ByteLevelEncoder
from stages.tokenizer.chunked_encode import WINDOW, MarkedTokenFinder, Name, SpecialTokenFinder, part_windows
from stages.tokenizer.fill_in_middle import find_fill_in_middle
from stages.tokenizer.sentencepiece import SentencePieceEncoder
from stages.tokenizer.steps import result_of
from stages.tokenizer.stripping import Stripping
from stages.tokenizer.token_lower_bound import TokenLowerBound, min_tokens
from stages.tokenizer.token_table import TokenTable
from stages.tokenizer.unigram import UnigramEncoder
from stages.tokenizer.wordpiece import WordPieceEncoder


class TooManyTokens(Exception):
    """The text has more tokens than the limit: `count` of them, or at least `count` unless `is_exact`."""

    def __init__(self, count: int, is_exact: bool) -> None:
        super().__init__(count, is_exact)
        self.count, self.is_exact = count, is_exact


class TokenizerSpec(NamedTuple):
    """The `tokenizer.*` keys of a GGUF file; a missing id is -1, a flag that the file does not state None."""

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    bos: int = -1
    eos: int = -1
    eot: int = -1
    add_bos: bool | None = None
    scores: Sequence[float] = ()
    unknown: int = -1
    add_space_prefix: bool | None = None
    revision: int = VOCABULARY_REVISION
    fim: Sequence[int] = ()  # of fill in the middle: prefix, suffix, middle
    fim_ends: Sequence[int] = ()
    charsmap: bytes = b""
    merges_spaces: bool | None = None
    strips_right: Sequence[int] = ()
    strips_left: Sequence[int] = ()
    strips_unicode: bool | None = None


class Encoder(Protocol):
    """Encodes the text between special tokens, for one kind of vocabulary."""

    holes: frozenset[int]  # bytes without a token: encoding drops them
    adds_bos: bool  # unless the file says otherwise
    may_drop: bool  # a part of a text may be in no token: white space, control characters

    @property
    def token_bytes(self) -> TokenTable:
        """The bytes of each id; the name of a special token."""

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (end of a chunk in the text, its token ids) from the text's start to its end."""

    def lengths(
        self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]
    ) -> Generator[None, None, NDArray[np.int64]]:
        """Return how many bytes of the text each token covers; those of holes are not counted. Yields between steps."""

    def shown(self, tokens: Iterable[int], is_first: bool) -> tuple[list[bytes], bool]:
        """Return the bytes of tokens as parts of a text, and `is_first` for the tokens that follow.

        is_first: the tokens begin the text, or follow a special token.
        """


class Vocabulary:
    """Immutable."""

    def __init__(self, spec: TokenizerSpec, tables: Tables | None = None) -> None:
        """`tables`: the compiled form, instead of the tokens, types, merges and scores of `spec`.

        Raises `ModelUnavailable` for a vocabulary that cannot be reproduced exactly, `KeyError` or `ValueError` for
        tables of another one.
        """
        problem = _pretokenizer_problem(spec) if tables else vocabulary_problem(spec)
        if problem:
            raise ModelUnavailable(problem)
        if tables is None:
            tables = make_tables(spec)
        types = tables["types"]
        self.size = len(types)
        self.control = frozenset(np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN, UNUSED))).tolist())
        named = np.flatnonzero(np.isin(types, NAMED)).tolist()
        names = msgspec.msgpack.decode(tables["names"].tobytes(), type=list[str])
        specials: dict[str, int] = {}  # control tokens by name
        always: dict[str, int] = {}
        marks: dict[str, int] = {}  # control and user-defined tokens; of one name the last
        for i, text, kind in zip(named, names, types[named].tolist(), strict=True):
            if text:
                (always if kind == USER_DEFINED else specials).setdefault(text, i)
                if kind != UNKNOWN:
                    marks[text] = i
        self._encoder: Encoder
        if spec.model == WORDPIECE:
            self._encoder = WordPieceEncoder(tables, spec.unknown)
        elif spec.model == UNIGRAM:
            self._encoder = UnigramEncoder(tables, spec.unknown, bool(spec.add_space_prefix), bool(spec.merges_spaces))
        elif spec.model == SENTENCEPIECE:
            self._encoder = SentencePieceEncoder(tables, spec.unknown, spec.add_space_prefix is not False)
        else:
            self._encoder = ByteLevelEncoder(tables, PRETOKENIZERS[spec.pre])
        self.bos, self.eos = spec.bos, spec.eos
        is_stated = spec.add_bos is not None and spec.model != WORDPIECE  # whose texts are always enclosed
        self.add_bos = bool(spec.add_bos if is_stated else self._encoder.adds_bos) and spec.bos >= 0
        ends = {spec.eos, spec.eot, *named_ends(marks)}
        self.eos_ids: tuple[int, ...] = tuple(sorted(i for i in ends if 0 <= i < self.size))
        self.fill_in_middle = find_fill_in_middle(marks, self.size, spec.fim, spec.fim_ends)
        self._bytes, self.holes = self._encoder.token_bytes, self._encoder.holes
        self._named_always, self._named = always, always | specials
        self.control_names = {text: i for text, i in specials.items() if text not in always}
        self._stripping = Stripping(spec.strips_right, spec.strips_left, bool(spec.strips_unicode))
        self._lower_bound = TokenLowerBound(self._stripping.weights(tables["weights"]))

    @cached_property
    def _always(self) -> SpecialTokenFinder:
        return SpecialTokenFinder(self._named_always, self._stripping)

    @cached_property
    def _specials(self) -> SpecialTokenFinder:
        return SpecialTokenFinder(self._named, self._stripping)

    def token_bytes(self, token: int) -> bytes:
        """Return the token's bytes: its name for a special token, none for an id outside the vocabulary."""
        return self._bytes[token] if 0 <= token < self.size else b""

    @property
    def pieces(self) -> tuple[bytes, bytes]:
        """The bytes of all tokens concatenated, and the end of each (u32 little-endian)."""
        return self._bytes.data, self._bytes.ends.tobytes()

    # ---------------------------------------------------------------- encoding

    def encode(
        self, text: str, parse_special: bool, add_bos: bool = False, marks: Collection[int] | None = None
    ) -> list[int]:
        """Return the token ids of `text`, with the arguments of `encode_steps`."""
        return list(result_of(self.encode_steps(text, parse_special, add_bos, marks=marks)))

    def encode_steps(
        self,
        text: str,
        parse_special: bool,
        add_bos: bool = False,
        token_limit: int = 0,
        marks: Collection[int] | None = None,
    ) -> Generator[None, None, array[int]]:
        """Encode in steps of some tens of ms: a generator that returns the token ids (i32) of `text`.

        parse_special: names of control tokens in the text become their ids; user-defined tokens always do.
        add_bos: start with the BOS token, if the model asks for one and the text does not start with it.
        marks: names of control tokens in the text count only if their first and last characters are at these positions.

        Raises `TooManyTokens` if and only if there are more than `token_limit` tokens (0: no limit).  A text of more
        than `WINDOW` characters is encoded only until that is certain.
        """
        is_bounded = token_limit > 0 and len(text) > WINDOW
        rest = self._lower_bound.weight(text) if is_bounded else 0  # of the text not yet encoded
        if is_bounded and min_tokens(rest) > token_limit:
            raise TooManyTokens(min_tokens(rest), False)
        ids, seen = array("i"), 0
        for end, new in self._encoder.chunks(self._names(parse_special, marks), text, WINDOW):
            ids.fromlist(new)
            if new and end - seen < WINDOW // 2 and end < len(text):
                continue  # many short chunks, between names of special tokens, are one step
            if is_bounded and end < len(text):
                rest -= self._lower_bound.weight(text[seen:end])
                if len(ids) + min_tokens(rest) > token_limit:
                    raise TooManyTokens(len(ids) + min_tokens(rest), False)
            seen = end
            yield
        if add_bos and self.add_bos and (not ids or ids[0] != self.bos):
            ids.insert(0, self.bos)
        if 0 < token_limit < len(ids):
            raise TooManyTokens(len(ids), True)
        return ids

    def _names(self, parse_special: bool, marks: Collection[int] | None = None) -> SpecialTokenFinder:
        if not parse_special:
            return self._always
        if marks is None:
            return self._specials
        return MarkedTokenFinder(self._specials, self.control_names.keys(), marks)

    def offsets(self, text: str, tokens: Sequence[int], parse_special: bool = False) -> NDArray[np.int64]:
        """Return the byte ranges of tokens, with the arguments of `offset_steps`."""
        return result_of(self.offset_steps(text, tokens, parse_special))

    def offset_steps(
        self, text: str, tokens: Sequence[int], parse_special: bool = False
    ) -> Generator[None, None, NDArray[np.int64]]:
        """Return the byte range [begin, end) of each token in the UTF-8 of its text, in steps; shape (tokens, 2).

        A token that was added, such as BOS, has an empty range.  White space that a special token takes is part of its
        range.  No range starts with a byte that encoding dropped because the vocabulary has no token for it.
        """
        ids = np.asarray(tokens, np.int64)
        names = self._names(parse_special)
        n_added = 0
        if len(tokens) and tokens[0] == self.bos:
            first = yield from self._first_name(names, text)
            before = text[: first[0]] if first is not None else ""
            is_written = first is not None and first[2] == self.bos
            if before and is_written:  # no token of what is before it: all of that was dropped
                dropped = self._encoder.may_drop and not (yield from self._encoder.lengths(names, before, ids)).any()
                is_written = dropped
            n_added = 0 if is_written else 1
        lengths = np.zeros(len(ids), np.int64)
        lengths[n_added:] = yield from self._encoder.lengths(names, text, ids[n_added:])
        ends = np.cumsum(lengths)
        ranges = np.stack([ends - lengths, ends], axis=1)
        data = text.encode() if self.holes else b""
        if not self.holes.isdisjoint(data):
            # The ranges ignore the dropped bytes; `kept` has the positions of the others.
            kept = np.flatnonzero(~np.isin(np.frombuffer(data, np.uint8), list(self.holes)))
            some = lengths > 0
            ranges[some] = np.stack([kept[ranges[some, 0]], kept[ranges[some, 1] - 1] + 1], axis=1)
        return ranges

    def _first_name(self, names: SpecialTokenFinder, text: str) -> Generator[None, None, Name | None]:
        """Return the first name that may have no token before it."""
        for parts in part_windows(names, text, WINDOW):
            if parts[0][2] is not None or not (self._encoder.may_drop or self._stripping.is_left):
                return parts[0][2]
            yield
        return None

    # ---------------------------------------------------------------- decoding

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Return the tokens' bytes as text, with U+FFFD for bytes that are not UTF-8.

        The inverse of `encode`, but for white space that special tokens have taken.
        """
        return b"".join(self.decoder(skip_special).push(tokens)).decode("utf-8", "replace")

    def decoder(self, skip_special: bool = False) -> TokenDecoder:
        """Return a decoder of one sequence of tokens that `encode` could have made."""
        return TokenDecoder(self._encoder, self.control if skip_special else frozenset(), self.size)


def _pretokenizer_problem(spec: TokenizerSpec) -> str:
    """Return what is wrong with the configured pre-tokenizer; all else was checked when the tables were made."""
    return vocabulary_problem(spec._replace(tokens=[" "], types=[])) if spec.model == BYTE_LEVEL else ""


class TokenDecoder:
    """Makes the bytes of a text from its tokens, part by part: any split of the tokens gives the same bytes."""

    def __init__(self, encoder: Encoder, hidden: frozenset[int], size: int) -> None:
        self._encoder, self._hidden, self._size = encoder, hidden, size
        self._is_first = True

    def push(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of the next tokens; ids outside the vocabulary have none."""
        known = [token for token in tokens if 0 <= token < self._size]
        parts, self._is_first = self._encoder.shown(known, self._is_first)
        if self._hidden:
            return [part for token, part in zip(known, parts, strict=True) if token not in self._hidden]
        return parts
