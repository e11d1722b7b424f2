"""Pieces of texts against the regular expressions of the `tokenizers` library."""

from __future__ import annotations

import re
import time
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from pipeline.models.pretokenizers import _GROUPS, PreTokenizer
from stages.tokenizer.piece_pattern import PiecePattern, piece_pattern
from stages.tokenizer.unicode_classes import CLASSES, CODE_POINTS, runs
from tests.properties import examples
from tools.reference.lines import make_lines

PRES = {names.split()[0]: pre for pre, names in _GROUPS.items()}
SURROGATES = range(0xD800, 0xE000)
# Characters that patterns distinguish, and any others.
characters = st.one_of(
    st.sampled_from(
        [*"aBsréǅ日1²_/!?'`$ \n\r\t\u3000\u0301", "'s", "'LL", "  ", "123", "12345", "１２", "IMGIMGAZ", "<sentinel:1>"]
    ),
    st.characters(exclude_categories=["Cs"]),
)


def expected(pre: PreTokenizer, text: str) -> list[int]:
    library = Sequence([Split(Regex(pattern), "isolated") for pattern in pre.patterns])
    return [end - begin for _, (begin, end) in library.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRES)
def test_pieces_are_those_of_the_library(name: str) -> None:
    pattern = piece_pattern(PRES[name])
    for line in make_lines(300, 3):
        assert pattern.lengths([line]) == expected(PRES[name], line), line


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(PRES)), st.lists(characters, min_size=1, max_size=30).map("".join))
def test_pieces_of_any_text(name: str, text: str) -> None:
    assert piece_pattern(PRES[name]).lengths([text]) == expected(PRES[name], text)


def groups(digit: str, text: str) -> set[int]:
    """Where groups of three digits begin, counted from the end of each run."""
    return {at for run in re.finditer(f"{digit}+", text) for at in range(run.end() - 3, run.start() - 1, -3)}


@settings(deadline=None, max_examples=examples(500))
@given(st.lists(st.sampled_from([*"1111２２²a ", "123", "１２３４"]), min_size=1, max_size=40).map("".join))
def test_digits_are_grouped_from_the_right(text: str) -> None:
    ends = {name: set(accumulate(piece_pattern(PRES[name]).lengths([text]))) for name in ("superbpe", "tiny_aya")}
    number, borders = "[1-9２-４²１]", range(1, len(text))
    assert groups(number, text) - {0} <= ends["tiny_aya"]
    sides = [bool(re.match(number, one)) for one in text]
    changes = {at for at in borders if sides[at] != sides[at - 1]}
    assert ends["superbpe"] == {*(groups("[0-9]", text) - {0}), *changes, len(text)}


@pytest.mark.parametrize("name", PRES)
@pytest.mark.parametrize("unit", ["1", "１2", "aA", " ", "\n", "e\u0301", "!"])
def test_long_runs_take_time_in_proportion_to_their_length(name: str, unit: str) -> None:
    """Some milliseconds. Time in proportion to the square of the length is above 20 s."""
    text = unit * (64_000 // len(unit))
    begin = time.thread_time()
    assert sum(piece_pattern(PRES[name]).lengths([text])) == len(text)
    assert time.thread_time() - begin <= 5


@pytest.mark.parametrize("name", PRES)
@pytest.mark.parametrize("end", ["1", "日", "\u200b"])
def test_white_space_takes_time_in_proportion_to_its_length(name: str, end: str) -> None:
    """Also in front of what does not join it."""
    text = " " * 16_000 + end
    begin = time.thread_time()
    assert sum(piece_pattern(PRES[name]).lengths([text])) == len(text)
    assert time.thread_time() - begin <= 5


def test_classes_are_those_of_the_library() -> None:
    begins, classes = runs()
    found = np.repeat(classes, np.diff(np.append(begins, CODE_POINTS)))
    assert len(found) == CODE_POINTS
    codes = np.array([code for code in range(CODE_POINTS) if code not in SURROGATES])
    text = "".join(map(chr, codes.tolist()))
    for name, pattern in {**{name: rf"\p{{{name}}}" for name in "LMNPS"}, "_": r"\s"}.items():
        is_in = np.ones(len(codes), bool)
        split = Split(Regex(f"{pattern}+"), "removed")
        for at in range(0, len(text), 1 << 15):
            for _, (begin, end) in split.pre_tokenize_str(text[at : at + (1 << 15)]):
                is_in[at + begin : at + end] = False
        wrong = codes[is_in != (found[codes] == CLASSES[name])]
        assert wrong.tolist() == []


@pytest.mark.parametrize("pattern", [r"\p{Lu}", r"\d+", r"\b"])
def test_unknown_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        PiecePattern(PreTokenizer((pattern,)))
