"""Unigram: the `t5` vocabularies of GGUF files, with the token ids of llama.cpp.

Kudo 2018.  A text is normalized (normalizer.py) and cut into the tokens whose scores, logarithms of probabilities, have
the highest sum; of equal sums the one whose last token is longer.  A character that no token begins and ends with is
unknown; unknown ones side by side are one token.  User-defined tokens score 0.

No token crosses a place whose two characters are neighbours in no token, and sums of scores (f32, added as f64) are
exact, so that the text between such places is cut on its own.  Where spaces are merged, a word with the space before it
is such a text as a rule: then ids of words are cached as they are written, before they are normalized.

Normalization loses characters, so that the text of some tokens is not the text that they were made of.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from pipeline.models.charsmap import Charsmap
from pipeline.models.key_table import KeyTable
from pipeline.models.token_trie import TokenTrie
from pipeline.models.vocabularies import NORMAL, SPACE
from pipeline.models.vocabulary_tables import NAMED, Tables
from stages.tokenizer.borders import Borders
from stages.tokenizer.chunked_encode import RunTooLong, SpecialTokenFinder, part_windows
from stages.tokenizer.covered import Ends, covered_bytes
from stages.tokenizer.normalizer import Normalizer, Spaces
from stages.tokenizer.steps import each_step
from stages.tokenizer.token_lattice import TokenLattice
from stages.tokenizer.token_table import TokenTable
from stages.tokenizer.word_cache import Ids, WordCache

MAX_RUN = 1 << 18  # normalized characters without a place that no token crosses
_UNKNOWN_PENALTY = np.float32(10)  # below the lowest score of a token
_WINDOW = 16_384  # characters: some ms
_FEW = 512  # characters of a text for which the kernel is not called: its words may be cached
_SHORT = 48  # characters of a normalized word that is cut as a whole: its parts are rarely cached


class UnigramEncoder:
    """Implements `vocabulary.Encoder`."""

    adds_bos = False
    may_drop = True

    def __init__(self, tables: Tables, unknown: int, adds_space: bool, merges_spaces: bool) -> None:
        """Raises `KeyError`, `ValueError` for tables of another kind."""
        self._rules = Normalizer(Charsmap.of_tables(tables), adds_space, merges_spaces)
        self._unknown = unknown
        self.token_bytes = TokenTable(tables)
        self._is_special = np.isin(tables["types"], NAMED)
        self.holes: frozenset[int] = frozenset()
        scores = tables["scores"]
        if scores.dtype != np.float32 or len(scores) != len(tables["types"]):
            raise ValueError(f"{len(tables['types'])} tokens have {len(scores)} scores ({scores.dtype})")
        lowest = scores[tables["types"] == NORMAL].min(initial=np.float32(np.inf))
        trie = TokenTrie(tables["trie"], tables["trie_slots"], tables["trie_tokens"])
        longest = int(self.token_bytes.lengths.max(initial=1))
        self._lattice = TokenLattice(trie, longest, scores, unknown, float(lowest - _UNKNOWN_PENALTY))
        self._borders = Borders(KeyTable(tables["borders"], tables["border_slots"]))
        # Whether a word ends at every space: no token goes on behind one.
        self._has_words = self._rules.keeps_words and not len(tables["inner_spaces"])
        self._words = WordCache(self._encode_words)  # as they are written
        self._runs = WordCache(self._cut)  # what no token crosses the ends of, normalized

    # ---------------------------------------------------------------- encoding

    def chunks(self, names: SpecialTokenFinder, text: str, window: int) -> Iterator[tuple[int, list[int]]]:
        """As `Encoder.chunks`. Ids of the end of a window come with the next one.

        A chunk may be empty: no place was found that no token crosses, or the text takes several steps.
        """
        window = min(window, _WINDOW)
        at, rest = 0, ""  # `rest`: normalized, and not yet cut
        spaces, last = Spaces(self._rules), -1  # `last`: the id before, in the text between two names
        while at < len(text):
            end = names.stripping.window_end(text, min(at + max(window, self._rules.longest), len(text)))
            name = names.find(text, at, end)
            end = name[0] if name is not None else end
            is_whole = name is not None or end == len(text)  # nothing behind the end belongs to a word before it
            if not is_whole and self._has_words and (space := text.rfind(" ", at, end)) >= 0:
                end, is_whole = space + 1, True
            if is_whole and self._has_words and not (rest or spaces.is_in_word or SPACE in text[at:end]):
                steps = self._encode_whole(text[at:end])
                at = end
            else:
                replaced, n = self._rules.replaced(text[at:end], is_whole)
                at += n
                begin = max(len(rest) - 1, 0)  # no place before it: `rest` would have been cut there
                rest += spaces.push(replaced)
                ends = (np.flatnonzero(self._borders.find(rest[begin:])) + begin + 1).tolist() + [len(rest)] * is_whole
                runs = list(map(rest.__getitem__, map(slice, [0, *ends], ends)))
                rest = rest[ends[-1] :] if ends else rest
                if len(rest) > MAX_RUN:
                    raise RunTooLong(f"{len(rest)} characters without a border, more than the tokenizer can process")
                steps = self._runs.encode(list(filter(None, runs)))
            ids = yield from each_step(steps, at)
            if self._unknown in ids:
                ids = [i for before, i in zip([last, *ids], ids) if not before == i == self._unknown]
            last = ids[-1] if ids else last
            if name is not None:
                at, spaces, last = name[1], Spaces(self._rules), -1
                ids.append(name[2])
            yield at, ids

    def _encode_whole(self, text: str) -> Generator[None, None, list[int]]:
        """Return the ids of a text of whole words."""
        if len(text) <= _FEW or not self._lattice.is_compiled:
            return (yield from self._words.encode(self._rules.words(text)))
        return (yield from self._lattice.all_ids(self._rules.parts(text), SPACE))

    def _encode_words(self, words: list[str]) -> Generator[None, None, dict[str, Ids]]:
        """Return the ids of words as they are written."""
        written = self._rules.written(words)
        whole = {text for text in written if len(text) <= _SHORT}
        found = yield from self._cut(list(whole))
        runs: dict[str, list[str]] = {}  # of the others
        for text in written:
            if text not in whole:
                ends = [*(np.flatnonzero(self._borders.find(text)) + 1).tolist(), len(text)]
                runs[text] = list(map(text.__getitem__, map(slice, [0, *ends], ends)))
        if runs:
            ids_of = yield from self._runs.find([run for some in runs.values() for run in some])
            found |= {text: tuple([i for run in some for i in ids_of[run]]) for text, some in runs.items()}
        return {word: found[text] for word, text in zip(words, written)}

    def _cut(self, texts: list[str]) -> Generator[None, None, dict[str, Ids]]:
        """Return the ids of normalized texts."""
        return dict(zip(texts, (yield from self._lattice.ids(texts))))

    # ---------------------------------------------------------------- offsets

    def lengths(
        self, names: SpecialTokenFinder, text: str, tokens: NDArray[np.int64]
    ) -> Generator[None, None, NDArray[np.int64]]:
        """As `Encoder.lengths`: what is before a token and belongs to none counts for it, at the end for the last."""
        return covered_bytes(text, len(tokens), self._ends(names, text))

    def _ends(self, names: SpecialTokenFinder, text: str) -> Ends:
        """Yield where the tokens of a text end: of what is between names, and of names."""
        at, spaces = 0, Spaces(self._rules)
        rest, source = "", np.zeros(0, np.int64)  # normalized and not yet cut; where the text of each character ends
        held: list[int] = []  # the end of an unknown token that may go on
        for parts in part_windows(names, text, max(_WINDOW, self._rules.longest)):
            replaced: list[str] = []
            written: list[str] = []
            begins: list[int] = []
            ends: list[int] = []
            named: list[int] = []
            closed: list[int] = []  # where texts between names end in what is written
            size = len(rest)
            for _, end, name in parts:
                is_end = name is not None or end == len(text)
                new, new_ends = self._rules.aligned(text[at:end], is_end)
                replaced += new
                new = spaces.push_each(new)
                written += new
                size += sum(map(len, new))
                new_ends = [at + place for place in new_ends]
                begins += [at, *new_ends][:-1]
                ends += new_ends
                at = new_ends[-1] if new_ends else at
                if is_end:
                    closed.append(size)
                    spaces = Spaces(self._rules)
                if name is not None:
                    at = name[1]
                    named.append(at)
            rest += "".join(written)
            source = np.append(source, _sources(replaced, written, begins, ends))
            # What is behind the last place that no token crosses comes with the next window.
            cuts_at = sorted({*closed, *(np.flatnonzero(self._borders.find(rest))[-1:] + 1).tolist()})
            runs = [(i, rest[i:j]) for i, j in zip([0, *cuts_at], cuts_at) if i < j]
            cuts = yield from each_step(self._lattice.cut([run for _, run in runs]), at)
            # What `held` is the end of ends before the first run.
            ids = [self._unknown] * len(held) + [token for cut in cuts for token, _ in cut]
            places = [0] * len(held) + [begin + end for (begin, _), cut in zip(runs, cuts) for _, end in cut]
            token_ends = held + source[np.array(places[len(held) :], np.int64) - 1].tolist()
            # Unknown tokens side by side are one. The last of them may go on in the next window.
            is_unknown = np.array(ids, np.int64) == self._unknown
            goes_on = is_unknown & ~np.isin(places, closed)
            is_held = bool(len(ids) and goes_on[-1])
            goes_on &= np.append(is_unknown[1:], is_held)[: len(ids)]
            held = token_ends[-1:] if is_held else []
            n_cut = cuts_at[-1] if cuts_at else 0
            rest, source = rest[n_cut:], source[n_cut:]
            yield at, sorted([end for end, skip in zip(token_ends, goes_on.tolist()) if not skip] + named)

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


def _sources(replaced: list[str], written: list[str], begins: list[int], ends: list[int]) -> NDArray[np.int64]:
    """Return where the text of each normalized character ends, for parts of a text, and these with their spaces.

    A space that was added belongs to what is before the text.
    """
    counts = np.fromiter(map(len, written), np.int64, len(written))
    is_added = counts > np.fromiter(map(len, replaced), np.int64, len(replaced))
    source = np.repeat(np.array(ends, np.int64), counts)
    source[(np.cumsum(counts) - counts)[is_added]] = np.array(begins, np.int64)[is_added]
    return source
