"""Byte-level BPE: the `gpt2` vocabularies of GGUF files.

Sennrich et al. 2016; the byte alphabet of GPT-2: every byte has a printable stand-in character, tokens are strings of
stand-ins, merges are ranked pairs.  The `tokenizers` library merges, chunk by chunk (`chunked_encode.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Chain

from pipeline.models.pretokenizers import PreTokenizer
from pipeline.models.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN
from stages.tokenizer.chunked_encode import SpecialTokenFinder, encode_chunks
from stages.tokenizer.token_lower_bound import TokenLowerBound

_HOLE = "\uffff"  # no stand-in


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's stand-in characters: printable Latin-1 for themselves, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class ByteLevelEncoder:
    """Implements `vocabulary.Encoder`."""

    may_drop = False

    def __init__(self, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: PreTokenizer) -> None:
        alphabet = byte_alphabet()
        self.adds_bos = pre.adds_bos
        self._groups_from_right = pre.groups_from_right
        self.token_bytes: list[bytes] = []
        for text, kind in zip(tokens, types, strict=True):
            plain = kind in (NORMAL, BYTE) and all(c in alphabet for c in text)
            self.token_bytes.append(bytes(alphabet[c] for c in text) if plain else text.encode())
        self._lengths = np.fromiter(map(len, self.token_bytes), np.int64, len(self.token_bytes))
        # Text must not become a control token, also if merges or a whole piece have its name.
        ids = {
            text: i
            for i, (text, kind) in reversed(list(enumerate(zip(tokens, types, strict=True))))
            if kind not in (CONTROL, UNKNOWN) or text in alphabet
        }
        # Bytes without a token: encoding drops them, as every published tokenizer does.
        self.holes = frozenset(byte for character, byte in alphabet.items() if character not in ids)
        pairs = []
        for line in merges:
            # The separator is the first space after at least one character: stand-ins are never spaces.
            left, space, right = line.partition(" ")
            if space and left in ids and right in ids and left + right in ids:
                pairs.append((left, right))
        self._hole = len(tokens)  # id of a byte without a token, which keeps its neighbours from merging
        unknown = {"vocab": ids | {_HOLE: self._hole}, "unk_token": _HOLE} if self.holes else {"vocab": ids}
        self._tokenizer = Tokenizer(BPE(merges=pairs, ignore_merges=pre.whole_pieces, **unknown))
        self._tokenizer.pre_tokenizer = Chain(
            [Split(Regex(p), "isolated") for p in pre.patterns] + [ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`."""
        for end, ids in encode_chunks(self._tokenizer, names, text, window, self._groups_from_right):
            yield end, [i for i in ids if i != self._hole] if self.holes else ids

    def lengths(self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `Encoder.lengths`."""
        return self._lengths[tokens]

    def lower_bound(self) -> TokenLowerBound:
        """As `Encoder.lower_bound`."""
        return TokenLowerBound(self.token_bytes, self.holes)

    def shown(self, tokens: Iterable[int], is_first: bool) -> tuple[list[bytes], bool]:
        """As `Encoder.shown`: the tokens' bytes."""
        pieces = self.token_bytes
        return [pieces[token] for token in tokens], False
