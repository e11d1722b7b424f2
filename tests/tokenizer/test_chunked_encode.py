"""Chunked encoding equals encoding the whole text, for each pre-tokenizer; the token limit is exact."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.models.pretokenizers import _GROUPS
from pipeline.models.vocabulary_tables import byte_weights
from stages.tokenizer import vocabulary as vocabulary_module
from stages.tokenizer.chunked_encode import (
    MAX_RUN,
    WINDOW,
    MarkedTokenFinder,
    RunTooLong,
    SpecialTokenFinder,
    cut_pieces,
)
from stages.tokenizer.pair_merger import PairMerger
from stages.tokenizer.piece_pattern import PiecePattern
from stages.tokenizer.token_lower_bound import TokenLowerBound, min_tokens
from stages.tokenizer.vocabulary import TooManyTokens, Vocabulary
from tests.tokenizer.byte_vocabulary import ALPHABET, byte_spec

PRES = [names.split()[0] for names in _GROUPS.values()]
# Characters of each class that a pattern distinguishes, and parts of contractions.
HOSTILE = [
    *"aBsréǅʰ日12²_/!?'",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u3000",
    "\u0301",
    "\u093e",
    "\u200d",
    "\ufe0f",
    "'s",
    "'re",
    "'LL",
    "👨\u200d👩",
    "\x04",
    "<s>",
    "<tool>",
]


def merging(pre: str, **changes: object) -> Vocabulary:
    """Any two of some characters merge, and the results merge again, so that a wrong border changes the tokens."""
    pairs = [ALPHABET[a] + " " + ALPHABET[b] for a, b in product(b"aBsr12!' \n", repeat=2)]
    words = [pair.replace(" ", "") for pair in pairs]
    pairs += [f"{word} {word}" for word in words]
    words += [word * 2 for word in words]
    spec = byte_spec(pre=pre, **changes)
    words = list(dict.fromkeys([*spec.tokens, *words]))
    return Vocabulary(spec._replace(tokens=words, types=[3, 3, 4, *[1] * (len(words) - 3)], merges=pairs))


VOCABULARIES = {pre: merging(pre) for pre in PRES}
texts = st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=6).flatmap(
    lambda few: st.lists(st.sampled_from(few), max_size=120).map("".join)
)


@pytest.mark.parametrize("pre", PRES)
@given(text=texts, window=st.sampled_from([1, 9, 16, 24, 40]))
def test_chunks_equal_the_whole(pre: str, text: str, window: int) -> None:
    vocabulary = VOCABULARIES[pre]
    whole = vocabulary.encode(text, True)  # in one window
    parts, end = [], 0
    for now, ids in vocabulary._encoder.chunks(vocabulary._specials, text, window):
        assert now >= end
        parts, end = parts + ids, now
    assert parts == whole
    assert end == len(text)


RUNS = ["\n" * n for n in range(1, 8)] + [" " * n for n in range(2, 9)] + ["\t" * n for n in range(1, 6)]
NAMES = {name: i for i, name in enumerate([*RUNS, "\t\t\t\tx", "aaaa", "aaaaaa", "<s>"])}


@given(st.lists(st.sampled_from([*"\n \tax", "\n\n\n", "    ", "\t\t\t\t", "aaaa", "<s>"]), max_size=20).map("".join))
def test_the_first_and_longest_name_is_found(text: str) -> None:
    found = [(at, name) for at in range(len(text)) for name in NAMES if text.startswith(name, at)]
    first = min(found, key=lambda one: (one[0], -len(one[1])), default=None)
    expected = (first[0], first[0] + len(first[1]), NAMES[first[1]]) if first else None
    finder = SpecialTokenFinder(NAMES)
    assert finder.find(text, 0, len(text)) == expected
    assert "\n\n\n\n" in finder._runs and "\t\t\t\t" not in finder._runs and "aaaa" not in finder._runs


def test_a_text_with_borders_has_many_chunks() -> None:
    vocabulary = VOCABULARIES["llama3"]
    ends = [end for end, _ in vocabulary._encoder.chunks(vocabulary._always, "ab 12! " * 100, 64)]
    assert len(ends) > 10


@given(st.text("he日l ", max_size=200), st.sampled_from([None, 8]), st.booleans())
def test_the_token_limit_is_exact(text: str, window: int | None, add_bos: bool) -> None:
    vocabulary = Vocabulary(byte_spec(add_bos=True))
    n = len(vocabulary.encode(text, False, add_bos))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_module, "WINDOW", window or WINDOW)
        for limit in {1, n - 1, n, n + 1} - {0, -1}:
            steps = vocabulary.encode_steps(text, False, add_bos, limit)
            if n <= limit:
                assert sum(1 for _ in steps) >= (len(text) > 0)
                continue
            with pytest.raises(TooManyTokens) as refused:
                list(steps)
            many = refused.value
            assert limit < many.count <= n
            assert many.count == n or not many.is_exact
            assert many.is_exact or window is not None


@given(texts)
def test_the_lower_bound_is_not_above_the_token_count(text: str) -> None:
    for vocabulary in VOCABULARIES.values():
        for parse in (False, True):
            assert min_tokens(vocabulary._lower_bound.weight(text)) <= len(vocabulary.encode(text, parse))


def test_weights_add_up_and_dropped_bytes_weigh_nothing() -> None:
    bound = TokenLowerBound(byte_weights([b"a", b"b", b"abab", b"c" * 3], [ord("c")]))
    assert min_tokens(bound.weight("ab" * 6)) == 3
    assert min_tokens(bound.weight("c" * 99)) == 0
    assert bound.weight("ab" * 70_000) == 2 * bound.weight("ab" * 35_000)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters that are cut at once, each time."""
    lengths: list[int] = []
    cut = PiecePattern.lengths

    def counting(pattern: PiecePattern, texts: list[str]) -> list[int]:
        lengths.append(sum(map(len, texts)))
        return cut(pattern, texts)

    monkeypatch.setattr(PiecePattern, "lengths", counting)
    return lengths


def test_a_text_that_is_certainly_too_long_is_not_encoded(encoded: list[int]) -> None:
    vocabulary = Vocabulary(byte_spec())
    for text in ("Hello, world. " * 300_000, "日" * 1_000_000, "\n" * 4_000_000):
        with pytest.raises(TooManyTokens) as refused:
            next(vocabulary.encode_steps(text, True, token_limit=8192))
        assert not refused.value.is_exact
        assert refused.value.count > 8192
    assert encoded == []


def test_encoding_stops_in_proportion_to_the_limit_and_not_to_the_text(encoded: list[int]) -> None:
    vocabulary = VOCABULARIES["llama3"]
    text = "1! " * 400_000  # the lower bound is a quarter of its tokens
    for limit in (320_000, 500_000):
        with pytest.raises(TooManyTokens):
            for _ in vocabulary.encode_steps(text, False, token_limit=limit):
                pass
        assert max(encoded) <= 2 * WINDOW
        assert sum(encoded) <= 3 * limit + 2 * WINDOW
        encoded.clear()
    assert len(vocabulary.encode(text, False)) > 500_000
    assert max(encoded) <= 2 * WINDOW


def test_thousands_of_special_tokens_are_few_steps() -> None:
    vocabulary = Vocabulary(byte_spec())
    steps = sum(1 for _ in vocabulary.encode_steps("<s>" * 100_000, True))
    assert steps <= 2 * 3 * 100_000 // WINDOW + 1


@given(
    st.lists(st.text("ab|<", min_size=1, max_size=5), min_size=1, max_size=12, unique=True),
    st.text("ab|<", max_size=40),
)
def test_the_longest_name_is_found(names: list[str], text: str) -> None:
    ids = {name: i for i, name in enumerate(names)}
    flat = re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))
    expected = [(one.start(), one.end(), ids[one.group()]) for one in flat.finditer(text)]
    found, at, made = [], 0, SpecialTokenFinder(ids)
    while at < len(text):
        one = made.find(text, at, min(at + 7, len(text)))
        found += [one] if one else []
        at = one[1] if one else at + 7
    assert found == expected


@given(
    st.lists(st.text("ab|<", min_size=1, max_size=6) | st.sampled_from(RUNS), min_size=1, max_size=12, unique=True),
    st.text("ab|<\n \t", max_size=60),
    st.integers(0, 20),
    st.sets(st.integers(0, 60)),
)
@example(["abab", "abab|<"], "|abab", 0, set())
def test_all_names_are_those_found_one_by_one(names: list[str], text: str, begin: int, marks: set[int]) -> None:
    made = SpecialTokenFinder({name: i for i, name in enumerate(names)})
    for finder in (made, MarkedTokenFinder(made, names[::2], marks)):
        expected, at, end = [], begin, max(begin, len(text) - 3)
        while at < end and (one := finder.find(text, at, end)) is not None:
            expected.append(one)
            at = one[1]
        assert finder.find_all(text, begin, end) == expected


def test_names_that_are_prefixes_of_each_other() -> None:
    names = SpecialTokenFinder({"<" * n: n for n in range(1, 300)})
    assert names.find("a" + "<" * 299 + "b", 0, 301) == (1, 300, 299)


@pytest.mark.parametrize("pre", [names.split()[0] for pre, names in _GROUPS.items() if pre.groups_from_right])
@pytest.mark.parametrize("rest", ["2", "22", "\U000116d0", "\U000116d0" * 2])
def test_groups_from_the_right_depend_on_all_digits_behind_them(pre: str, rest: str) -> None:
    """The digits of a window have another number than those of the text; some are newer than Python's Unicode."""
    vocabulary, text = VOCABULARIES[pre], "1" * 100 + rest + "a "
    chunks = list(vocabulary._encoder.chunks(vocabulary._specials, text * 3, len(text) - 3))
    assert [token for _, ids in chunks for token in ids] == vocabulary.encode(text * 3, True)


@pytest.mark.parametrize("unit", ["a", " ", "日"])
def test_a_piece_that_is_too_long_is_refused(unit: str) -> None:
    vocabulary = Vocabulary(byte_spec(pre="llama3"))
    with pytest.raises(RunTooLong, match=f"{MAX_RUN + 1} characters without a border"):
        vocabulary.encode(unit * (MAX_RUN + 1), False)


def test_a_number_that_is_too_long_is_refused() -> None:
    vocabulary = Vocabulary(byte_spec(pre="tiny_aya"))
    with pytest.raises(RunTooLong, match="characters without a border"):
        vocabulary.encode("1" * (2 * MAX_RUN + 1) + "a", False)


def test_a_long_piece_takes_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernel, which may be stored and takes longer steps (test_merge_kernel.py)."""
    monkeypatch.setattr(PairMerger, "compiled", lambda self: None)
    vocabulary = Vocabulary(byte_spec(pre="llama3"))
    steps = vocabulary.encode_steps("a" * 50_000, False)
    assert sum(1 for _ in steps) > 5


@given(st.lists(st.text(min_size=1, max_size=6), max_size=60), st.integers(0, 3))
def test_pieces_are_those_of_their_lengths(pieces: list[str], rest: int) -> None:
    """With few and with many pieces, in ASCII and beyond it, and of texts with any character; the rest is left out."""
    assert cut_pieces("".join(pieces) + "x" * rest, list(map(len, pieces))) == pieces
    some = [piece.encode("ascii", "ignore").decode() or "a" for piece in pieces]
    assert cut_pieces("".join(some) + "\0" * rest, list(map(len, some))) == some
