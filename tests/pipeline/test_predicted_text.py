"""A prediction is followed through replaced, added, missing and moved parts, and what came true is counted once."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.predicted_text import SEARCHED, PredictionFollower

TEXT = [i * 7919 % 1009 for i in range(300)]


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def followed(prediction: list[int], output: list[int]) -> tuple[PredictionFollower, list[int]]:
    """The follower after the output, and the places of the output where it expected another token, or none."""
    follower, wrong = PredictionFollower(packed(prediction)), []
    for index, token in enumerate(output):
        if follower.expected(1) != (token,):
            wrong.append(index)
        follower.follow(output, 0, index + 1)
    return follower, wrong


def test_an_exact_prediction_comes_true_as_a_whole() -> None:
    follower, wrong = followed(TEXT, [*TEXT, 5000])
    assert (follower.accepted, follower.rejected, wrong) == (300, 0, [300])


CHANGED = {
    "replaced": ([*TEXT[:100], 5000, *TEXT[101:]], [100]),
    "replaced by two": ([*TEXT[:100], 5000, 5001, *TEXT[101:]], [100, 101, 102, 103]),
    "added": ([*TEXT[:100], 5000, *TEXT[100:]], [100, 101, 102]),
    "missing": (TEXT[:100] + TEXT[103:], [100, 101]),
    "moved": (TEXT[100:] + TEXT[:100], [0, 1, 200, 201]),
    "at the first token": ([5000, *TEXT[1:]], [0]),
    "text before it": ([5000, 5001, 5002, 5003, *TEXT], [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("change", CHANGED)
def test_after_a_change_the_prediction_is_found_again(change: str) -> None:
    output, wrong = CHANGED[change]
    follower, found = followed(TEXT, output)
    assert found == wrong
    assert follower.accepted == len(output) - len(wrong)
    assert follower.accepted + follower.rejected == len(TEXT)


def test_the_nearest_occurrence_is_taken_and_the_search_is_bounded() -> None:
    line = [1, 2, 3]
    prediction = [10, *line, 11, 12, *line, 13, *TEXT, *([7] * SEARCHED), 900, 901, 902]
    follower = PredictionFollower(packed(prediction))
    output = [10, *line, 11, 5000, 5001, 2, 3]
    follower.follow(output, 0, len(output))
    assert follower.expected(1) == (13,)
    output += [900, 901]
    follower.follow(output, 0, len(output))
    assert follower.expected(1) == (), "too far away"


def test_bytes_that_begin_within_a_token_are_no_occurrence() -> None:
    prediction = [5, 0x0201, 0x0403, 6]
    follower = PredictionFollower(packed(prediction))
    shifted = memoryview(packed(prediction))[5:13].cast("b")
    output = [9, 9, *array("i", bytes(shifted))]
    follower.follow(output, 0, len(output))
    assert follower.expected(1) == ()


@settings(max_examples=200, deadline=None)
@given(
    prediction=st.lists(st.integers(0, 5), max_size=60),
    output=st.lists(st.integers(0, 5), max_size=60),
    cuts=st.lists(st.integers(0, 60)),
)
def test_counts_do_not_depend_on_how_the_output_came(prediction: list[int], output: list[int], cuts: list[int]) -> None:
    once, parts = PredictionFollower(packed(prediction)), PredictionFollower(packed(prediction))
    once.follow(output, 0, len(output))
    for cut in [*sorted(cuts), len(output)]:
        parts.follow([3, 3, *output], 2, min(cut, len(output)))
    assert (parts.accepted, parts.expected(99)) == (once.accepted, once.expected(99))
    assert 0 <= once.accepted <= min(len(prediction), len(output))
    assert once.accepted + once.rejected == len(prediction)
