"""The compiled `cut_words` (cut_words.py), called from Python, without numba: cuts words into the tokens of a trie."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.models.token_trie import TokenTrie
from stages.tokenizer.kernels import compiled

CUT_STEPS = 1 << 18  # characters that one call looks up: some ms
END = -1  # behind each word
_BETWEEN = "\n"  # of words in a text
# The parameters.
CODES, N_CODES, NODES, NODE_CODES, FIRST, STEPS, KNOWN, UNKNOWN = range(8)
OUT, OUT_ENDS, WORD_ENDS = range(8, 11)
BEGIN, AT, N_WORDS, N_OUT, WRITTEN = range(11, 16)  # how far it is: 0 at first
IS_SCORED, UNKNOWN_SCORE, BEST, LAST, BEGINS, N_PARAMETERS = range(16, 22)  # of the highest sums; 0: the longest
NODE = 3  # numbers of a node: its first child, its token, and that token's score, f32
N_FIRST = 1 << 16  # characters whose tokens are found at once
KNOWN_BITS = 12  # of the number of places for words whose results are remembered
KNOWN_SYMBOLS, KNOWN_RESULTS = 20, 6  # of such a word
KNOWN_ENTRY = 2 + 2 * KNOWN_RESULTS + KNOWN_SYMBOLS  # i32 of a place: how many symbols, how many results, all three
Ints = NDArray[np.int32]


class Cuts(NamedTuple):
    """The tokens of words, one word after the other: i32.

    ids: the tokens.  ends: where each ends in its word, in characters.  word_ends: where each word's tokens end.
    """

    ids: Ints
    ends: Ints
    word_ends: Ints

    def ids_of_words(self) -> list[tuple[int, ...]]:
        """The ids of each word."""
        ids, ends = self.ids.tolist(), self.word_ends.tolist()
        return list(map(tuple, map(ids.__getitem__, map(slice, [0, *ends], ends))))

    def pairs_of_words(self) -> list[list[tuple[int, int]]]:
        """The tokens of each word: id and end."""
        pairs, ends = list(zip(self.ids.tolist(), self.ends.tolist())), self.word_ends.tolist()
        return list(map(pairs.__getitem__, map(slice, [0, *ends], ends)))


class WordCutter:
    """Cuts words over the trie of one vocabulary. May be called in several threads."""

    def __init__(
        self,
        function: Callable[[int], int],
        trie: TokenTrie,
        n_tokens: int,
        scores: NDArray[np.float32] | None = None,
        unknown: int = -1,
        unknown_score: float = 0.0,
    ) -> None:
        """`scores`: of each token; None: the longest token is taken, and a word with a part that is none is `unknown`.

        Raises `ValueError` for a trie with tokens that the vocabulary does not have.
        """
        keys, tokens = trie.arrays
        n_scores = n_tokens if scores is None else len(scores)
        if len(tokens) and not int(tokens.max()) < min(n_tokens, n_scores):
            raise ValueError(f"a text is token {int(tokens.max())} of {n_tokens} with {n_scores} scores")
        self._function = function
        self._nodes, self._codes = _nodes(keys, tokens, scores)
        self._first = np.full(N_FIRST, -1, np.int32)
        first = np.arange(1, self._nodes[1, 0])  # the root's children
        is_low = self._codes[first] < N_FIRST
        self._first[self._codes[first[is_low]]] = first[is_low]
        self._is_scored = scores is not None
        self._unknown, self._unknown_score = unknown, np.array([unknown_score], np.float64)
        self._rooms: list[Ints] = []  # for the words that are known, one for each call at the same time

    @classmethod
    def find(
        cls,
        trie: TokenTrie,
        n_tokens: int,
        scores: NDArray[np.float32] | None = None,
        unknown: int = -1,
        unknown_score: float = 0.0,
    ) -> Self | None:
        """One for this trie, if the function is stored."""
        function = compiled.load(compiled.CUT_WORDS)
        return cls(function, trie, n_tokens, scores, unknown, unknown_score) if function is not None else None

    def cut(self, words: Sequence[str], prefix: str = "") -> Generator[None, None, Cuts]:
        """Cut words, each with a prefix in front. Yields between calls of some ms."""
        if not words:
            return Cuts(*(np.zeros(0, np.int32) for _ in Cuts._fields))
        text = f"{prefix}{f'{_BETWEEN}{prefix}'.join(words)}{_BETWEEN}"
        codes = np.frombuffer(text.encode("utf-32-le"), "<i4").astype(np.int32)
        n = len(codes)
        ends = np.flatnonzero(codes == ord(_BETWEEN))
        if len(ends) != len(words):  # a word has it too
            lengths = np.fromiter(map(len, words), np.int64, len(words))
            ends = np.cumsum(lengths + len(prefix) + 1) - 1
        codes[ends] = END
        out, out_ends, word_ends = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(len(words), np.int32)
        try:
            known = self._rooms.pop()
        except IndexError:
            known = np.zeros(KNOWN_ENTRY << KNOWN_BITS, np.int32)
        arrays: dict[int, NDArray[Any]] = {
            CODES: codes,
            NODES: self._nodes,
            NODE_CODES: self._codes,
            FIRST: self._first,
        }
        arrays |= {KNOWN: known, OUT: out, OUT_ENDS: out_ends, WORD_ENDS: word_ends}
        if self._is_scored:
            arrays |= {UNKNOWN_SCORE: self._unknown_score, BEST: np.full(n, -np.inf)}
            arrays |= {LAST: np.empty(n, np.int32), BEGINS: np.empty(n, np.int32)}
        given = np.zeros(N_PARAMETERS, np.int64)
        for place, array in arrays.items():
            given[place] = array.ctypes.data
        given[N_CODES], given[IS_SCORED] = n, self._is_scored
        given[UNKNOWN], given[STEPS] = self._unknown, CUT_STEPS
        while not self._function(given.ctypes.data):
            yield
        self._rooms.append(known)
        n_out = int(given[N_OUT])
        return Cuts(out[:n_out], out_ends[:n_out], word_ends)


def _nodes(
    keys: NDArray[np.uint64], tokens: Ints, scores: NDArray[np.float32] | None
) -> tuple[NDArray[np.int32], Ints]:
    """The nodes of a trie (nodes + 1, `NODE`), and the character that leads to each (nodes,). Node 0 is the root.

    The children of a node lie between its first child and the next node's, in the order of their characters: they are
    found in one place of memory, not in one for each hash.  Raises `ValueError` for keys in another order.
    """
    n = len(keys) + 1
    parents = (keys >> np.uint64(32)).astype(np.int64)
    if n > 1 and (not (keys[1:] > keys[:-1]).all() or parents[-1] >= n):
        raise ValueError(f"the {n - 1} nodes of a trie are not in the order of the nodes before them")
    nodes = np.zeros((n + 1, NODE), np.int32)
    nodes[1:, 0] = np.cumsum(np.bincount(parents, minlength=n)[:n])
    nodes[:, 0] += 1  # entry `i` of the keys is node `i + 1`
    nodes[:, 1] = -1
    nodes[1:n, 1] = tokens
    if scores is not None:
        nodes.view(np.float32)[1:n, 2] = np.where(tokens >= 0, scores[np.maximum(tokens, 0)], 0)
    codes = np.zeros(n, np.int32)
    codes[1:] = (keys & np.uint64(0x7FFFFFFF)).astype(np.int32)
    return nodes, codes
