"""Unigram: the `t5` vocabularies of GGUF files, with the token ids of llama.cpp.

Kudo 2018.  A text is normalized (normalizer.py) and cut into the tokens whose scores, logarithms of probabilities, have
the highest sum; of equal sums the one whose last token is longer.  A character that no token begins and ends with is
unknown; unknown ones side by side are one token.  User-defined tokens score 0.

No token crosses a place whose two characters are neighbours in no token, and sums of scores (f32, added as f64) are
exact, so that the text between such places is cut on its own.  The parts are, as a rule, words; ids of short ones are
cached.

Normalization loses characters, so that the text of some tokens is not the text that they were made of.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.models.charsmap import read_charsmap
from pipeline.models.vocabularies import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED
from stages.tokenizer.chunked_encode import RunTooLong, SpecialTokenFinder
from stages.tokenizer.covered import covered_bytes
from stages.tokenizer.normalizer import Normalizer, Spaces

MAX_RUN = 1 << 18  # normalized characters without a place that no token crosses
STEP = 4096  # characters of a long run that are cut at once: about 20 ms
CACHED_CHARACTERS = 32  # of a part whose ids are cached
MAX_CACHED = 1 << 16  # parts; some 20 MB
_UNKNOWN_PENALTY = np.float32(10)  # below the lowest score of a token
_WINDOW = 8192  # characters: about 15 ms if no part is cached


class UnigramEncoder:
    """Implements `vocabulary.Encoder`."""

    adds_bos = False
    may_drop = True

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        scores: Sequence[float],
        unknown: int,
        rules: Normalizer,
    ) -> None:
        self._rules, self._unknown = rules, unknown
        hidden = (CONTROL, UNKNOWN, BYTE)
        self._ids: dict[str, int] = {}
        self._scores: list[float] = np.asarray(scores, np.float32).tolist()
        # By the first two characters of tokens, the characters of the longest; so few texts have to be looked up.
        self._longest: dict[str, int] = {}
        lowest = np.float32(np.inf)
        self._pairs: set[str] = set()
        for i, (text, kind) in enumerate(zip(tokens, types)):
            if kind == NORMAL:
                lowest = min(lowest, np.float32(scores[i]))
            if kind == USER_DEFINED:
                self._scores[i] = 0.0
            if text and kind not in hidden:
                self._ids[text] = i
                if len(text) > 1:
                    self._longest[text[:2]] = max(len(text), self._longest.get(text[:2], 0))
                    self._pairs.update(map("".join, pairwise(text)))
        self._unknown_score = float(lowest - _UNKNOWN_PENALTY)
        raw = (CONTROL, UNKNOWN, USER_DEFINED)
        self.token_bytes = [
            (text if kind in raw else text.replace(SPACE, " ")).encode() for text, kind in zip(tokens, types)
        ]
        self._is_special = [kind in raw for kind in types]
        self.holes: frozenset[int] = frozenset()
        lead = f"{SPACE}*" if SPACE * 2 in self._pairs else f"{SPACE}?"
        before = "".join(re.escape(pair[0]) for pair in self._pairs if pair[1] == SPACE and pair[0] != SPACE)
        word = f"[^{SPACE}]+"
        if before:
            word = f"(?:[^{SPACE}]+(?:(?<=[{before}]){SPACE}+)?)+"
        self._parts = re.compile(f"{lead}{word}|{lead[:-1]}{'+' if lead.endswith('*') else ''}")
        self._cache: dict[str, list[int]] = {}

    # ---------------------------------------------------------------- encoding

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`. A chunk may be empty: no place was found that no token crosses.

        Ids of the end of a window come with the next one.
        """
        window = min(window, _WINDOW)
        at, rest = 0, ""  # `rest`: normalized, and not yet cut
        spaces, last = Spaces(self._rules), -1  # `last`: the id before, in the text between two names
        while at < len(text):
            end = min(at + max(window, self._rules.longest), len(text))
            name = names.find(text, at, end)
            is_end = name is not None or end == len(text)
            replaced, n = self._rules.replaced(text[at : name[0] if name is not None else end], is_end)
            at += n
            n_old = len(rest)
            rest += spaces.push(replaced)
            border = len(rest) if is_end else self._last_border(rest, max(n_old - 1, 0))
            if len(rest) - border > MAX_RUN:
                raise RunTooLong(
                    f"{len(rest) - border} characters without a border, more than the tokenizer can process"
                )
            ids: list[int] = []
            for part in self._parts.findall(rest[:border]):
                cached = self._cache.get(part)
                new = cached if cached is not None else (yield from self._encode(part, at))
                ids += new[1:] if new[0] == last == self._unknown else new
                last = new[-1]
            rest = rest[border:]
            if name is not None:
                at, spaces, last = name[1], Spaces(self._rules), -1
                ids.append(name[2])
            yield at, ids

    def _last_border(self, text: str, begin: int) -> int:
        """Return the last place after `begin` that no token crosses; 0 if there is none."""
        pairs = self._pairs
        for at in range(len(text) - 1, begin, -1):
            if text[at - 1 : at + 1] not in pairs:
                return at
        return 0

    def _runs(self, part: str) -> Iterator[str]:
        """Yield the stretches of a part that have no place which no token crosses; all of a short one."""
        if len(part) <= CACHED_CHARACTERS:
            yield part
            return
        begin, pairs = 0, self._pairs
        for end, pair in enumerate(map("".join, pairwise(part)), 1):
            if pair not in pairs:
                yield part[begin:end]
                begin = end
        yield part[begin:]

    def _encode(self, part: str, at: int) -> Generator[tuple[int, list[int]], None, list[int]]:
        """Return the ids of a part. Yields an empty chunk at `at` between the steps of a long one."""
        ids: list[int] = []
        for run in self._runs(part):
            for token, _ in (yield from self._cut(run, at)):
                if not (ids and ids[-1] == token == self._unknown):
                    ids.append(token)
        if len(part) <= CACHED_CHARACTERS:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[part] = ids
        return ids

    def _cut(self, part: str, at: int) -> Generator[tuple[int, list[int]], None, list[tuple[int, int]]]:
        """Return the ids of a part and their ends in it. Yields as `_encode`."""
        n, ids, scores = len(part), self._ids, self._scores
        best = [-np.inf] * (n + 1)  # the sum of scores of the best tokens up to each place
        best[0] = 0.0
        tokens, begins = [0] * (n + 1), [0] * (n + 1)  # the last of these tokens
        for begin in range(n):
            if begin % STEP == STEP - 1:
                yield at, []
            score = best[begin]
            token = ids.get(part[begin])
            total = score + (scores[token] if token is not None else self._unknown_score)
            if total > best[begin + 1]:
                best[begin + 1], begins[begin + 1] = total, begin
                tokens[begin + 1] = token if token is not None else self._unknown
            for end in range(begin + 2, min(begin + self._longest.get(part[begin : begin + 2], 0), n) + 1):
                token = ids.get(part[begin:end])
                if token is not None and score + scores[token] > best[end]:
                    best[end], tokens[end], begins[end] = score + scores[token], token, begin
        found: list[tuple[int, int]] = []
        end = n
        while end:
            # Of unknown tokens side by side the last one stays, which ends where all of them do.
            if not (found and found[-1][0] == tokens[end] == self._unknown):
                found.append((tokens[end], end))
            end = begins[end]
        found.reverse()
        return found

    # ---------------------------------------------------------------- offsets

    def lengths(self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `Encoder.lengths`: what is before a token and belongs to none counts for it, at the end for the last."""
        return covered_bytes(names, text, len(tokens), self._ends)

    def _ends(self, text: str) -> list[int]:
        """Return where the tokens of a text without names end."""
        spaces = Spaces(self._rules)
        parts: list[str] = []
        source: list[int] = []  # where the text of each normalized character ends
        for begin, end, to in self._rules.aligned(text):
            new = spaces.push(to)
            parts.append(new)
            # A space that was added belongs to what is before the text.
            n_added = max(0, len(new) - len(to))
            source += [begin] * n_added + [end] * (len(new) - n_added)
        ends: list[int] = []
        at, last = 0, -1
        for part in self._parts.findall("".join(parts)):
            for run in self._runs(part):
                for token, end in _result(self._cut(run, 0)):
                    if token == last == self._unknown:
                        ends.pop()
                    ends.append(source[at + end - 1])
                    last = token
                at += len(run)
        return ends

    # ---------------------------------------------------------------- decoding

    def shown(self, tokens: Iterable[int], is_first: bool) -> tuple[list[bytes], bool]:
        """As `Encoder.shown`: without the space that encoding has added."""
        pieces, special = self.token_bytes, self._is_special
        if not self._rules.has_prefix:
            return [pieces[token] for token in tokens], False
        parts = []
        for token in tokens:
            piece = pieces[token]
            if special[token]:
                is_first = True
            elif is_first:
                piece, is_first = piece.removeprefix(b" "), False
            parts.append(piece)
        return parts, is_first


def make_rules(charsmap: bytes, adds_space: bool, merges_spaces: bool) -> Normalizer:
    """The normalization that a file describes. Raises `ValueError` for a damaged table."""
    return Normalizer(read_charsmap(charsmap), adds_space, merges_spaces)


def _result(steps: Generator[object, None, list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)
