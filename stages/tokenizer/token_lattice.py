"""The best tokens of words in a unigram vocabulary: those whose scores have the highest sum (Viterbi 1967).

A kernel finds them where it is stored (`kernels/cut_words.py`).  Otherwise all tokens in some words are found at once,
with NumPy (`pipeline/models/token_trie.py`); then each word's best ones from left to right.  Of equal sums the one
whose last token is longer counts.  A character that no token is alone is unknown, and unknown ones side by side are one
token.  Independent of normalization and of what a word is.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.models.token_trie import END, TokenTrie
from stages.tokenizer.kernels.word_cutter import WordCutter
from stages.tokenizer.word_cache import Ids

_SLAB = 16_384  # characters that are searched at once: some ms
STEP = 32_768  # tokens that are compared without a pause: some ms
Cut = list[tuple[int, int]]  # ids, and where each ends in its word
Edges = tuple[list[int], list[int], list[int], list[float]]


class TokenLattice:
    """Cuts words.

    longest: at least the characters of the longest token.  scores: of each token, f32.  unknown_score: of a character
    that is unknown.
    """

    def __init__(
        self, trie: TokenTrie, longest: int, scores: NDArray[np.float32], unknown: int, unknown_score: float
    ) -> None:
        """Raises `ValueError` for scores that no vocabulary has."""
        if not np.isfinite(scores).all() or not np.isfinite(unknown_score):
            raise ValueError("a score is not finite")
        if not 0 <= unknown < len(scores):
            raise ValueError(f"the unknown token is {unknown} of {len(scores)}")
        self._trie, self._longest, self._scores = trie, longest, scores
        self._unknown, self._unknown_score = unknown, unknown_score
        self._compiled = WordCutter.find(trie, len(scores), scores, unknown, unknown_score)

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel is stored; then new words take about as long as known ones."""
        return self._compiled is not None

    def all_ids(self, words: Sequence[str], prefix: str) -> Generator[None, None, list[int]]:
        """Return the ids of words with a prefix, one word after the other, by the kernel. Yields between steps."""
        assert self._compiled is not None
        found: list[int] = (yield from self._compiled.cut(words, prefix)).ids.tolist()
        return found

    def ids(self, words: Sequence[str]) -> Generator[None, None, list[Ids]]:
        """Return the ids of each word's tokens. Yields between steps."""
        if self._compiled is not None:
            return (yield from self._compiled.cut(words)).ids_of_words()
        cuts = yield from self.cut(words)
        return [tuple([i for i, _ in cut]) for cut in cuts]

    def cut(self, words: Sequence[str]) -> Generator[None, None, list[Cut]]:
        """Return the tokens of each word. Yields between steps."""
        if not words:
            return []
        if self._compiled is not None:
            return (yield from self._compiled.cut(words)).pairs_of_words()
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        ends = np.cumsum(lengths + 1) - 1  # where the `END` behind each word is
        text = "\n".join(words) + "\n"
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64)
        codes[ends] = END
        best = [-np.inf] * len(codes)  # the sum of scores of the best tokens up to each place
        for begin in (ends - lengths).tolist():
            best[begin] = 0.0
        tokens, begins = [0] * len(codes), [0] * len(codes)  # the last of these tokens
        for offset in range(0, len(codes), _SLAB):
            edges = self._edges(codes[offset : offset + _SLAB + self._longest], offset)
            for first in range(0, len(edges[0]), STEP):
                for start, end, token, score in zip(*(column[first : first + STEP] for column in edges)):
                    total = best[start] + score
                    if total > best[end]:
                        best[end], tokens[end], begins[end] = total, token, start
                if len(codes) > _SLAB:
                    yield
        unknown = self._unknown
        cuts = []
        for begin, end in zip((ends - lengths).tolist(), ends.tolist()):
            found: Cut = []
            at = end
            while at > begin:
                # Of unknown tokens side by side the last one stays, which ends where all of them do.
                if not (found and found[-1][0] == tokens[at] == unknown):
                    found.append((tokens[at], at - begin))
                at = begins[at]
            found.reverse()
            cuts.append(found)
        return cuts

    def _edges(self, codes: NDArray[np.uint64], offset: int) -> Edges:
        """Return begins, ends, ids and scores of the tokens that begin in a slab, in the order of their begins."""
        is_unknown = codes[:_SLAB] != END  # characters without a token of their own
        begins, ends, tokens = [], [], []
        for places, length, found in self._trie.matches(np.append(codes, np.uint64(END))):
            if len(codes) > _SLAB:
                n = int(np.searchsorted(places, _SLAB))
                places, found = places[:n], found[:n]
            if length == 1:
                is_unknown[places] = False
            begins.append(places)
            ends.append(places + length)
            tokens.append(found)
        scores = [self._scores[found].astype(np.float64) for found in tokens]
        unknown = np.flatnonzero(is_unknown)
        begins.append(unknown)
        ends.append(unknown + 1)
        tokens.append(np.full(len(unknown), self._unknown))
        scores.append(np.full(len(unknown), self._unknown_score))
        all_begins = np.concatenate(begins)
        order = np.argsort(all_begins, kind="stable")
        return (
            (all_begins[order] + offset).tolist(),
            (np.concatenate(ends)[order] + offset).tolist(),
            np.concatenate(tokens)[order].tolist(),
            np.concatenate(scores)[order].tolist(),
        )
