"""The sequence that kills the worker is found, and only that one ends."""

from __future__ import annotations

import pytest

from stages.scheduler.recovery.quarantine import DEATH, STALL, Quarantine, is_quarantined, next_alone

from .builders import scheduled


def test_suspect_counts_single_out_the_culprit():
    a, b, c = members = [scheduled(name, 10, 9) for name in "abc"]
    for _ in range(3):
        assert next_alone(members) is None
        assert Quarantine().record(members, DEATH) is None
    assert all(is_quarantined(s) for s in members)
    assert next_alone(members) is a
    a.suspect_count = 0  # its step went well
    assert next_alone(members) is b
    assert Quarantine().record([b], DEATH) is b
    b.is_done = True
    assert next_alone(members) is c


@pytest.mark.parametrize(("weight", "most"), [(DEATH, 4), (STALL, 2)])
def test_a_step_of_one_needs_no_separation(weight, most):
    a = scheduled("a", 10, 9)
    for _ in range(most - 1):
        assert Quarantine().record([a], weight) is None
    assert Quarantine().record([a], weight) is a


def test_a_third_stall_finds_one_of_many():
    a, b = members = [scheduled(name, 10, 9) for name in "ab"]
    assert Quarantine().record(members, STALL) is None
    assert Quarantine().record(members, STALL) is None
    assert next_alone(members) is a
    assert Quarantine().record([a], STALL) is a
    assert not is_quarantined(scheduled("c", 10, 9))
    assert next_alone([b]) is b
