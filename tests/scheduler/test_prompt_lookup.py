"""Prompt lookup proposes what followed earlier occurrences."""

from __future__ import annotations

from array import array

from stages.scheduler.draft.prompt_lookup import PromptLookup
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
