"""Prompt lookup proposes what followed earlier occurrences."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from stages.scheduler.draft.prompt_lookup import MAX_ENTRIES, NGRAM, SLICE, PromptLookup
from stages.scheduler.draft.text_source import MAX_PAUSE


def test_proposals_are_the_tokens_that_followed_last_time():
    lookup = PromptLookup(8)
    tokens = array("i", [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3])
    assert lookup.propose(tokens, 8) == (4, 5, 6, 7)
    assert lookup.propose(tokens, 2) == (4, 5)
    lookup.record(15, 4, 4)
    assert lookup.length == 8
    assert PromptLookup(8).propose(array("i", [1, 2]), 8) == ()


def test_failures_pause_for_ever_longer_and_success_ends_that():
    lookup = PromptLookup(8)
    tokens = array("i", [1, 2, 3] * 4)
    pauses = []
    for _ in range(12):
        assert lookup.propose(tokens, 8)
        n = len(tokens)
        lookup.record(n, 4, 0)
        while not lookup.propose(tokens, 8):
            tokens.append(tokens[len(tokens) - 3])
        pauses.append(len(tokens) - n)
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE
    lookup.record(len(tokens), 4, 2)
    assert lookup.propose(tokens, 8)


def test_a_step_delayed_in_vain_counts_as_a_failure():
    lookup = PromptLookup(8)
    tokens = array("i", [1, 2, 3, 4, 1, 2, 3])
    assert lookup.expects_match(tokens)
    tokens.append(9)
    assert lookup.propose(tokens, 8) == ()
    assert not lookup.expects_match(array("i", [*tokens, 1]))


def test_a_call_enters_a_bounded_part_of_a_long_prompt() -> None:
    """From its end: text that repeats something early is found some calls later."""
    lookup = PromptLookup(4)
    tokens = array("i", [*range(100_000, 102_000), *range(3 * SLICE), 100_000, 100_001, 100_002])
    n_entered = 0
    n_calls = 0
    while not (found := lookup.propose(tokens, 4)):
        entered = len(lookup._newer) + len(lookup._older)
        assert n_entered < entered <= n_entered + SLICE
        n_entered, n_calls = entered, n_calls + 1
    assert found == (100_003, 100_004, 100_005, 100_006)
    assert n_calls == 4


def test_memory_is_bounded_and_the_last_tokens_are_found() -> None:
    lookup = PromptLookup(4)
    tokens = array("i", range(100_000))
    rounds = 5 * MAX_ENTRIES // SLICE
    for i in range(rounds):
        tokens.extend(range(200_000 + i * SLICE, 200_000 + (i + 1) * SLICE))
        assert lookup.propose(tokens, 4) == ()
        assert len(lookup._newer) + len(lookup._older) <= 2 * (MAX_ENTRIES + SLICE)
    start = 200_000 + rounds * SLICE - MAX_ENTRIES
    tokens.extend([start, start + 1, start + 2])
    assert lookup.propose(tokens, 2) == (start + 3, start + 4)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 7))
def test_proposals_follow_the_last_occurrence(text: list[int], step: int) -> None:
    lookup = PromptLookup(4)
    for n in range(0, len(text) + 1, step):
        known = text[:n]
        last = [end for end in range(NGRAM, n) if known[end - NGRAM : end] == known[n - NGRAM :]]
        expected = tuple(known[last[-1] : last[-1] + 4]) if last else ()
        assert lookup.propose(array("i", known), 4) == expected
