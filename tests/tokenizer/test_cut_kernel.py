"""The compiled cuts of words into tokens give what NumPy gives, for any trie, and check what they are given."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.key_table import make_slots
from pipeline.models.token_trie import TokenTrie, make_trie
from pipeline.models.vocabulary_tables import make_tables
from stages.tokenizer import unigram, wordpiece
from stages.tokenizer.kernels import compiled, word_cutter
from stages.tokenizer.kernels.compiled import compiling
from stages.tokenizer.kernels.word_cutter import WordCutter
from stages.tokenizer.token_lattice import TokenLattice
from stages.tokenizer.unigram import UnigramEncoder
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from stages.tokenizer.wordpiece import WordPieceEncoder
from tests.tokenizer.trained import unigram_spec, wordpiece_spec
from tools.reference.lines import CASES, MARKS, SPACES, make_lines

pytestmark = pytest.mark.slow

T = TypeVar("T")
UNKNOWN = 0
SPECS = {
    "words": unigram_spec(True, True, True, False),
    "no words": unigram_spec(False, False, True, True),
    "wordpiece": wordpiece_spec(),
}
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
texts = any_text | st.lists(
    st.sampled_from([*"aabbé einx日本\n-!", "aaaa", "  ", "the ", "quick", *SPACES, *MARKS, *CASES]), max_size=60
).map("".join)
# Tries of tokens that overlap, and words of their characters and others.
tries = st.dictionaries(st.text("ab\n日", min_size=1, max_size=5), st.integers(1, 12), max_size=12)
words_of_tries = st.lists(st.text("ab\n日c", max_size=12) | st.text("ab", max_size=30), max_size=6)
steps = st.sampled_from([1, 7, 1 << 18])


def result(calls: Generator[None, None, T]) -> tuple[T, int]:
    """What a generator returns, and how often it yields."""
    n = 0
    while True:
        try:
            next(calls)
        except StopIteration as end:
            return end.value, n
        n += 1


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """The kernels are compiled, as before a start."""
    with compiling():
        pass
    assert compiled.load(compiled.CUT_WORDS) is not None


@pytest.fixture(scope="module")
def both(kernel: None) -> dict[str, tuple[Vocabulary, Vocabulary]]:
    """By name, each vocabulary with the kernel and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WordCutter, "find", classmethod(lambda cls, *given, **named: None))
        plain = {name: Vocabulary(spec) for name, spec in SPECS.items()}
    return {name: (Vocabulary(spec), plain[name]) for name, spec in SPECS.items()}


def is_compiled(vocabulary: Vocabulary) -> bool:
    encoder = vocabulary._encoder
    if isinstance(encoder, UnigramEncoder):
        return encoder._lattice._compiled is not None
    assert isinstance(encoder, WordPieceEncoder)
    return encoder._compiled is not None


def test_the_two_ways_are_two(both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    assert {(is_compiled(one), is_compiled(other)) for one, other in both.values()} == {(True, False)}


@settings(deadline=None)
@given(tries, words_of_tries, st.lists(st.sampled_from([-1.0, -2.0, -3.0, -0.5]), min_size=13, max_size=13), steps)
def test_the_best_tokens_are_those_of_numpy(
    ids: dict[str, int], words: list[str], scores: list[float], n_steps: int
) -> None:
    """Of few scores, so that sums are often equal, in one call of the kernel and in many."""
    trie, of_tokens = TokenTrie(*make_trie(ids)), np.array(scores, np.float32)
    lattice = TokenLattice(trie, 5, of_tokens, UNKNOWN, -13.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_cutter, "CUT_STEPS", n_steps)
        found, n_yields = result(lattice.cut(words))
        again, _ = result(lattice.ids(words))  # of short words that are remembered
        assert again == [tuple([token for token, _ in cut]) for cut in found]
        assert result(lattice.all_ids(words, ""))[0] == [token for cut in again for token in cut]
        patch.setattr(lattice, "_compiled", None)
        assert found == result(lattice.cut(words))[0]
    if n_steps == 1 and words:
        assert n_yields >= max(map(len, words)) - 1


@settings(deadline=None)
@given(tries, words_of_tries, steps, st.sampled_from(["", "_"]))
def test_the_longest_tokens_are_those_of_the_definition(
    ids: dict[str, int], words: list[str], n_steps: int, prefix: str
) -> None:
    ids |= {"_": 13, "_a": 14}
    cutter = WordCutter.find(TokenTrie(*make_trie(ids)), 15)
    assert cutter is not None
    expected = []
    for word in words:
        text, cut, at = prefix + word, [], 0
        while fits := [token for token in ids if text.startswith(token, at)]:
            token = max(fits, key=len)
            at += len(token)
            cut.append((ids[token], at))
        expected.append(cut if at == len(text) else [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_cutter, "CUT_STEPS", n_steps)
        for _ in range(2):  # the second time short words are remembered
            cuts, _ = result(cutter.cut(words, prefix))
            assert cuts.pairs_of_words() == expected
            assert cuts.ids_of_words() == [tuple([token for token, _ in cut]) for cut in expected]


@settings(deadline=None)
@pytest.mark.parametrize("name", SPECS)
@given(text=texts, parse_special=st.booleans())
def test_ids_and_offsets_are_the_same(
    name: str, text: str, parse_special: bool, both: dict[str, tuple[Vocabulary, Vocabulary]]
) -> None:
    one, other = both[name]
    tokens = other.encode(text, parse_special)
    assert one.encode(text, parse_special) == tokens
    with pytest.MonkeyPatch.context() as patch:
        for module in (unigram, wordpiece):
            patch.setattr(module, "_FEW", 0)
        assert one.encode(text, parse_special) == tokens
    assert np.array_equal(one.offsets(text, tokens, parse_special), other.offsets(text, tokens, parse_special))


@pytest.mark.parametrize("name", SPECS)
def test_ids_of_long_texts_are_the_same(name: str, both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    """Windows that end in words, and words longer than a call of the kernel looks up."""
    lines = "\n".join(make_lines(100, 7))
    one, other = both[name]
    for text in (lines, "the quick" * 4_000, "日本" * 3_000 + lines, "a" * 20_000):
        assert one.encode(text, True) == other.encode(text, True)


def test_tables_that_do_not_fit_are_refused(both: dict[str, tuple[Vocabulary, Vocabulary]]) -> None:
    """The kernel would read beside them."""
    keys, slots, tokens = make_trie({"a": 1, "ab": 2})
    with pytest.raises(ValueError, match="tokens are int64, expected int32"):
        TokenTrie(keys, slots, tokens.astype(np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keys are uint32 and slots int32"):
        TokenTrie(keys.astype(np.uint32), slots, tokens)  # type: ignore[arg-type]
    trie = TokenTrie(keys, slots, tokens)
    for n_tokens, n_scores in ((2, 3), (3, 2)):
        with pytest.raises(ValueError, match="a text is token 2 of"):
            WordCutter.find(trie, n_tokens, np.zeros(n_scores, np.float32))
    swapped = TokenTrie(keys[::-1].copy(), make_slots(keys[::-1].copy()), tokens)
    orphan = TokenTrie(keys + np.uint64(7 << 32), slots, tokens)
    for other in (swapped, orphan):
        with pytest.raises(ValueError, match="not in the order"):
            WordCutter.find(other, 3)
    spec: TokenizerSpec = SPECS["words"]
    tables = dict(make_tables(spec))
    for scores in (tables["scores"][:-1], tables["scores"].astype(np.float64)):
        with pytest.raises(ValueError, match="tokens have .* scores"):
            Vocabulary(spec, tables | {"scores": scores})
