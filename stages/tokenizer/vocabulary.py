"""A GGUF `gpt2` vocabulary: from text to token ids, and from ids to bytes.

Byte-level BPE (Sennrich et al. 2016; the byte alphabet of GPT-2): every byte has a printable stand-in
character, tokens are strings of stand-ins, merges are ranked pairs.  The `tokenizers` library merges, chunk by
chunk (`chunked_encode.py`).  Independent of requests, streams and templates.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Chain

from pipeline.errors import ModelUnavailable
from stages.tokenizer.chunked_encode import WINDOW, MarkedTokenFinder, SpecialTokenFinder, encode_chunks
from stages.tokenizer.pretokenizers import PRETOKENIZERS
from stages.tokenizer.token_lower_bound import TokenLowerBound, min_tokens

# tokenizer.ggml.token_type (GGUF specification)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's stand-in characters: printable Latin-1 for themselves, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TooManyTokens(Exception):
    """The text has more tokens than the limit: `count` of them, or at least `count` unless `is_exact`."""

    def __init__(self, count: int, is_exact: bool) -> None:
        super().__init__(count, is_exact)
        self.count, self.is_exact = count, is_exact


class TokenizerSpec(NamedTuple):
    """The `tokenizer.*` keys of a GGUF file."""

    kind: str  # tokenizer.ggml.model
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    bos: int = -1
    eos: int = -1
    eot: int = -1
    add_bos: bool = False
    chat_template: str = ""


class Vocabulary:
    """Immutable. The constructor raises `ModelUnavailable` for a vocabulary that it cannot reproduce exactly."""

    def __init__(self, spec: TokenizerSpec) -> None:
        if spec.kind != "gpt2":
            raise ModelUnavailable(f"tokenizer.ggml.model is {spec.kind!r}; supported: 'gpt2' (byte-level BPE)")
        pre = PRETOKENIZERS.get(spec.pre)
        if pre is None:
            raise ModelUnavailable(f"tokenizer.ggml.pre is {spec.pre!r}; supported: {', '.join(sorted(PRETOKENIZERS))}")
        if len(spec.types) not in (0, len(spec.tokens)):
            raise ModelUnavailable(
                f"tokenizer.ggml.token_type has {len(spec.types)} entries for {len(spec.tokens)} tokens"
            )
        types = spec.types or [NORMAL] * len(spec.tokens)
        alphabet = byte_alphabet()
        self.size = len(spec.tokens)
        self.bos, self.eos, self.add_bos = spec.bos, spec.eos, spec.add_bos and spec.bos >= 0
        self.eos_ids: tuple[int, ...] = tuple(sorted({i for i in (spec.eos, spec.eot) if 0 <= i < self.size}))
        self.control = frozenset(i for i, t in enumerate(types) if t in (CONTROL, UNKNOWN, UNUSED))
        self._bytes: list[bytes] = []
        specials: dict[str, int] = {}  # control tokens by name
        always: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(spec.tokens, types, strict=True)):
            plain = kind in (NORMAL, BYTE) and all(c in alphabet for c in text)
            self._bytes.append(bytes(alphabet[c] for c in text) if plain else text.encode())
            if kind in (CONTROL, UNKNOWN) and text:
                specials.setdefault(text, i)
            elif kind == USER_DEFINED and text:
                always.setdefault(text, i)
        self._lengths = np.array([len(data) for data in self._bytes], np.int64)
        self._always = SpecialTokenFinder(always)
        self._specials = SpecialTokenFinder(always | specials)
        self.control_names = {text: i for text, i in specials.items() if text not in always}
        ids = {text: i for i, text in reversed(list(enumerate(spec.tokens)))}
        # Bytes without a token: encoding drops them, as every published tokenizer does.
        self.holes = frozenset(byte for character, byte in alphabet.items() if character not in ids)
        self._lower_bound = TokenLowerBound(self._bytes, self.holes)
        merges = []
        for line in spec.merges:
            # The separator is the first space after at least one character: stand-ins are never spaces.
            left, space, right = line.partition(" ")
            if space and left in ids and right in ids and left + right in ids:
                merges.append((left, right))
        self._tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=pre.whole_pieces))
        self._tokenizer.pre_tokenizer = Chain(
            [Split(Regex(p), "isolated") for p in pre.patterns] + [ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def token_bytes(self, token: int) -> bytes:
        """Return the token's bytes: its name for a special token, none for an id outside the vocabulary."""
        return self._bytes[token] if 0 <= token < self.size else b""

    @property
    def pieces(self) -> tuple[bytes, bytes]:
        """The bytes of all tokens concatenated, and the end of each (u32 little-endian)."""
        return b"".join(self._bytes), np.cumsum(self._lengths).astype("<u4").tobytes()

    def encode(
        self, text: str, parse_special: bool, add_bos: bool = False, marks: Collection[int] | None = None
    ) -> list[int]:
        """Return the token ids of `text`, with the arguments of `encode_steps`."""
        steps = self.encode_steps(text, parse_special, add_bos, marks=marks)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return list(end.value)

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
        names = self._specials if parse_special else self._always
        if parse_special and marks is not None:
            names = MarkedTokenFinder(self._specials, self.control_names.keys(), marks)
        ids, seen = array("i"), 0
        for end, new in encode_chunks(self._tokenizer, names, text, WINDOW):
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

    def offsets(self, text: str, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Return the byte range [begin, end) of each token in the UTF-8 of its text; shape (tokens, 2).

        A BOS token that was added has an empty range.  No range starts with a byte that encoding dropped because the
        vocabulary has no token for it.
        """
        data = text.encode()
        lengths = self._lengths[np.asarray(tokens, np.int64)]
        if len(tokens) and tokens[0] == self.bos and not data.startswith(self.token_bytes(self.bos)):
            lengths[0] = 0
        ends = np.cumsum(lengths)
        ranges = np.stack([ends - lengths, ends], axis=1)
        if not self.holes.isdisjoint(data):
            # The ranges ignore the dropped bytes; `kept` has the positions of the others.
            kept = np.flatnonzero(~np.isin(np.frombuffer(data, np.uint8), list(self.holes)))
            some = lengths > 0
            ranges[some] = np.stack([kept[ranges[some, 0]], kept[ranges[some, 1] - 1] + 1], axis=1)
        return ranges

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Return the tokens' bytes as text, with U+FFFD for bytes that are not UTF-8."""
        return b"".join(self.token_bytes(t) for t in tokens if not (skip_special and t in self.control)).decode(
            "utf-8", "replace"
        )
