"""SentencePiece BPE with scores: the `llama` vocabularies of GGUF files, with the token ids of llama.cpp.

Spaces are written as U+2581, and the text after a special token begins with one more (`add_space_prefix`).  Of all
pairs of neighbours whose concatenation is a token, the one with the highest score is merged first, and of equal scores
the leftmost.  A character that is no token becomes the tokens of its bytes, or the unknown token.

Merges are exact and local: no merge crosses a place where the two characters beside it are neighbours in no token.
Between such places the text is merged on its own, and the ids of short parts are cached.  The parts begin, as a rule,
with the space of a word.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.models.vocabularies import BYTE, CONTROL, SPACE, UNKNOWN, USER_DEFINED, byte_name
from stages.tokenizer.chunked_encode import RunTooLong, SpecialTokenFinder
from stages.tokenizer.token_lower_bound import TokenLowerBound

MAX_RUN = 1 << 18  # characters without a place that no merge crosses; merging them takes about a second
MERGES_PER_STEP = 8192  # of a long run: about 20 ms
CACHED_CHARACTERS = 32  # of a part whose ids are cached
MAX_CACHED = 1 << 16  # parts; some 20 MB
_SHORT = 48  # characters up to which a search of all pairs is faster than a heap
_NEVER = 1 << 40  # above all ranks
_WINDOW = 8192  # characters: about 15 ms if no part is cached


class SentencePieceEncoder:
    """Implements `vocabulary.Encoder`."""

    adds_bos = True
    may_drop = False

    def __init__(
        self, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: int, adds_space: bool
    ) -> None:
        self._prefix = SPACE if adds_space else ""
        self._unknown = unknown
        # Text must not become a control token, nor a byte by its name.
        hidden = (CONTROL, UNKNOWN, BYTE)
        self._ids = {text: i for i, (text, kind) in enumerate(zip(tokens, types)) if text and kind not in hidden}
        named = {text: i for i, text in enumerate(tokens)}
        self._byte_ids = [named.get(byte_name(byte), -1) for byte in range(256)]
        for i in self._byte_ids:
            self._ids.pop(tokens[i] if i >= 0 else "", None)
        self._has_bytes = min(self._byte_ids) >= 0
        bytes_by_id = {i: bytes([byte]) for byte, i in enumerate(self._byte_ids)}
        # How a token's bytes are written: the names of special tokens as they are.
        raw = (CONTROL, UNKNOWN, USER_DEFINED)
        self.token_bytes = [
            bytes_by_id.get(i) or (text if kind in raw else text.replace(SPACE, " ")).encode()
            for i, (text, kind) in enumerate(zip(tokens, types))
        ]
        self._texts = tokens
        self._is_special = np.array([kind in raw for kind in types], bool)
        self._lengths = np.fromiter(map(len, self.token_bytes), np.int64, len(tokens))
        self.holes: frozenset[int] = frozenset()
        order = np.unique(-np.asarray(scores, np.float32), return_inverse=True)[1].tolist()
        self._ranks = {text: order[i] for text, i in self._ids.items()}  # the lowest is merged first
        self._pairs = {pair for text in self._ids for pair in map("".join, pairwise(text))}
        before = "".join(re.escape(pair[0]) for pair in self._pairs if pair[1] == SPACE and pair[0] != SPACE)
        word = f"{SPACE}*[^{SPACE}]+"
        if before:
            word = f"{SPACE}*(?:[^{SPACE}]+(?:(?<=[{before}]){SPACE}+)?)+"
        self._parts = re.compile(f"{word}|{SPACE}+")
        self._cache: dict[str, list[int]] = {}

    # ---------------------------------------------------------------- encoding

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`. A chunk may be empty: a part was longer than the window."""
        window = min(window, _WINDOW)
        at, size, prefix = 0, window, self._prefix
        while at < len(text):
            end = min(at + size, len(text))
            name = names.find(text, at, end)
            if name is not None:
                end = name[0]
            # Without a name the text after the window may belong to the last part.
            is_cut = name is None and end < len(text)
            ids: list[int] = []
            parts = self._parts.findall((prefix + text[at:end]).replace(" ", SPACE)) if end > at else []
            if is_cut:
                del parts[-1]
            for part in parts:
                cached = self._cache.get(part)
                ids += cached if cached is not None else (yield from self._encode(part, at))
            taken = sum(map(len, parts))
            if taken:
                at, prefix, size = at + taken - len(prefix), "", window
            elif is_cut:
                size *= 2
                if size > 2 * MAX_RUN + window:
                    raise _too_long(size // 2)
            if name is not None:
                at, prefix = name[1], self._prefix
                ids.append(name[2])
            yield at, ids

    def _encode(self, part: str, at: int) -> Generator[tuple[int, list[int]], None, list[int]]:
        """Return the ids of a part. Yields an empty chunk at `at` between the steps of a long one."""
        ids: list[int] = []
        for run in self._runs(part):
            if len(run) <= _SHORT:
                symbols = self._merge_few(run)
            else:
                if len(run) > MAX_RUN:
                    raise _too_long(len(run))
                symbols = yield from self._merge_many(run, at)
            for symbol in symbols:
                known = self._ids.get(symbol)
                if known is not None:
                    ids.append(known)
                elif self._has_bytes:
                    ids += [self._byte_ids[byte] for byte in symbol.encode()]
                else:
                    ids.append(self._unknown)
        if len(part) <= CACHED_CHARACTERS:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[part] = ids
        return ids

    def _runs(self, part: str) -> Iterator[str]:
        """Yield the stretches of a part that have no place which no merge crosses."""
        begin, pairs = 0, self._pairs
        for end, pair in enumerate(map("".join, pairwise(part)), 1):
            if pair not in pairs:
                yield part[begin:end]
                begin = end
        yield part[begin:]

    def _merge_few(self, run: str) -> list[str]:
        """Return the merged symbols of a short run."""
        symbols, ranks = list(run), self._ranks
        costs = [ranks.get(pair, _NEVER) for pair in map("".join, pairwise(symbols))]
        while costs and (best := min(costs)) < _NEVER:
            at = costs.index(best)  # the leftmost
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
            del costs[at]
            if at:
                costs[at - 1] = ranks.get(symbols[at - 1] + symbols[at], _NEVER)
            if at < len(costs):
                costs[at] = ranks.get(symbols[at] + symbols[at + 1], _NEVER)
        return symbols

    def _merge_many(self, run: str, at: int) -> Generator[tuple[int, list[int]], None, list[str]]:
        """Return the merged symbols of a run. Yields between steps."""
        ranks, n = self._ranks, len(run)
        symbols = list(run)  # "": merged into the one before
        after, before = list(range(1, n + 1)), list(range(-1, n - 1))
        heap = [
            (rank, left, 2)
            for left, pair in enumerate(map("".join, pairwise(run)))
            if (rank := ranks.get(pair)) is not None
        ]
        heapq.heapify(heap)
        count = 0
        while heap:
            count += 1
            if not count % MERGES_PER_STEP:
                yield at, []
            _, left, size = heapq.heappop(heap)
            right = after[left]
            # Symbols only grow: an entry whose size is not that of both has been overtaken.
            if not symbols[left] or right >= n or len(symbols[left]) + len(symbols[right]) != size:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = right = after[right]
            if right < n:
                before[right] = left
            for one, other in ((before[left], left), (left, right)):
                if one >= 0 and other < n:
                    both = symbols[one] + symbols[other]
                    rank = ranks.get(both)
                    if rank is not None:
                        heapq.heappush(heap, (rank, one, len(both)))
        return [symbol for symbol in symbols if symbol]

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
                n = 1 if token == self._unknown else len(self._texts[token])
                lengths[index] = sum(sizes[at : at + n])
                at += n
            index += 1
        return index

    def lower_bound(self) -> TokenLowerBound:
        """As `Encoder.lower_bound`: U+2581 in a token stands for a space or for itself."""
        covered = [*self.token_bytes]
        for text in self._texts:
            if SPACE in text:
                covered += [text.encode(), text.replace(SPACE, " ").encode()]
        # Without byte tokens an unknown character of up to four bytes is one token.
        return TokenLowerBound(covered, () if self._has_bytes else range(0x80, 0x100))

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
