"""A GGUF `gpt2` vocabulary: text to token ids and ids to bytes.

Byte-level BPE (Sennrich et al. 2016; the byte alphabet of GPT-2): every byte has a printable stand-in
character, tokens are strings of stand-ins, merges are ranked pairs.  The merging itself is done by the
`tokenizers` library.  Knows nothing of requests, streams or templates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Chain

from pipeline.errors import ModelUnavailable
from stages.tokenizer.pretokenizers import PRETOKENIZERS

# tokenizer.ggml.token_type (GGUF specification)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-in characters: printable Latin-1 for themselves, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


LONG_PIECE = 4096  # characters: about 4 ms


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
    """Immutable once built. Raises `ModelUnavailable` for a vocabulary it cannot reproduce exactly."""

    def __init__(self, spec: TokenizerSpec) -> None:
        if spec.kind != "gpt2":
            raise ModelUnavailable(
                f"tokenizer.ggml.model is {spec.kind!r}; supported: 'gpt2' (byte-level BPE)"
            )
        pre = PRETOKENIZERS.get(spec.pre)
        if pre is None:
            raise ModelUnavailable(
                f"tokenizer.ggml.pre is {spec.pre!r}; supported: {', '.join(sorted(PRETOKENIZERS))}"
            )
        if len(spec.types) not in (0, len(spec.tokens)):
            raise ModelUnavailable(
                f"tokenizer.ggml.token_type has {len(spec.types)} entries for {len(spec.tokens)} tokens"
            )
        types = spec.types or [NORMAL] * len(spec.tokens)
        alphabet = byte_alphabet()
        self.size = len(spec.tokens)
        self.bos, self.eos, self.add_bos = spec.bos, spec.eos, spec.add_bos and spec.bos >= 0
        self.eos_ids: tuple[int, ...] = tuple(
            sorted({i for i in (spec.eos, spec.eot) if 0 <= i < self.size})
        )
        self.control = frozenset(i for i, t in enumerate(types) if t in (CONTROL, UNKNOWN, UNUSED))
        self._bytes: list[bytes] = []
        specials: dict[str, int] = {}
        always: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(spec.tokens, types, strict=True)):
            plain = kind in (NORMAL, BYTE) and all(c in alphabet for c in text)
            self._bytes.append(bytes(alphabet[c] for c in text) if plain else text.encode())
            if kind in (CONTROL, UNKNOWN) and text:
                specials.setdefault(text, i)
            elif kind == USER_DEFINED and text:
                always.setdefault(text, i)
        self._always = always
        self._specials = always | specials
        self._split_always = _splitter(self._always)
        self._split_special = _splitter(self._specials)
        ids = {text: i for i, text in reversed(list(enumerate(spec.tokens)))}
        # Bytes without a token: text that holds them loses them (no published tokenizer keeps them).
        self.holes = frozenset(byte for character, byte in alphabet.items() if character not in ids)
        merges = []
        for line in spec.merges:
            # The separator is the first space after at least one character: stand-ins are never spaces.
            left, space, right = line.partition(" ")
            if space and left in ids and right in ids and left + right in ids:
                merges.append((left, right))
        self._tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=pre.whole_pieces))
        self._tokenizer.pre_tokenizer = Chain(
            [Split(Regex(p), "isolated") for p in pre.patterns]
            + [ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes; a special token's are its name. Ids outside the vocabulary have none."""
        return self._bytes[token] if 0 <= token < self.size else b""

    def encode(self, text: str, parse_special: bool, add_bos: bool = False) -> list[int]:
        """Token ids of `text`.

        parse_special: names of control tokens in the text become their ids (user-defined tokens
        always do).  add_bos: begin with the start token, if the model asks for one and the text
        does not begin with it already.
        """
        split, special = (
            (self._split_special, self._specials) if parse_special else (self._split_always, self._always)
        )
        ids: list[int] = []
        for piece in split.split(text) if split else [text]:
            if not piece:
                continue
            token = special.get(piece)
            if token is not None:
                ids.append(token)
            else:
                ids.extend(self._merge(piece))
        if add_bos and self.add_bos and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        return ids

    def _merge(self, piece: str) -> list[int]:
        if len(piece) < LONG_PIECE:
            ids: list[int] = self._tokenizer.encode(piece, add_special_tokens=False).ids
            return ids
        # Only a batch is encoded without the interpreter's lock, which others want meanwhile.
        (encoded,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        return list(encoded.ids)

    def offsets(self, text: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Byte range [begin, end) of each token in the UTF-8 of the text that it was encoded from.

        A start token that was added has an empty range.  Bytes that the vocabulary has no token for
        (some have holes) were dropped by `encode`; no range begins with one.
        """
        data = text.encode()
        holes = self.holes if not self.holes.isdisjoint(data) else frozenset[int]()
        at, ranges = 0, []
        for i, token in enumerate(tokens):
            piece = self.token_bytes(token)
            if i == 0 and token == self.bos and not data.startswith(piece):
                ranges.append((0, 0))
                continue
            if not holes:
                begin, at = at, at + len(piece)
            else:
                begin = -1
                for _ in piece:
                    while data[at] in holes:
                        at += 1
                    begin = at if begin < 0 else begin
                    at += 1
            ranges.append((begin, at))
        return ranges

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """The canonical text: bytes joined, what is not UTF-8 replaced by U+FFFD."""
        return b"".join(
            self.token_bytes(t) for t in tokens if not (skip_special and t in self.control)
        ).decode("utf-8", "replace")


def _splitter(names: dict[str, int]) -> re.Pattern[str] | None:
    """A pattern whose one group keeps the names, the longest first."""
    if not names:
        return None
    return re.compile("(" + "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)) + ")")
