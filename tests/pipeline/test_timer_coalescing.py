"""Idle processes wake at the same moments, and no process wakes twice for one of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pipeline.runtime import timer_coalescing


def beats(wait_s: float, early_s: float) -> list[float]:
    """Wake-up times of a process that always wakes `early_s` early (or late)."""
    now, times = 1234.321, []
    for _ in range(50):
        now += timer_coalescing.until_aligned(now, wait_s) - early_s
        times.append(now)
    return times


@pytest.mark.parametrize(
    "wait_s", [timer_coalescing.ALIGN_S, timer_coalescing.IDLE_HEARTBEAT_S, 10 * timer_coalescing.ALIGN_S]
)
@pytest.mark.parametrize("early_s", [0.0, 0.001, 0.04, -0.001, -0.04])
def test_all_processes_wake_together_and_once(wait_s: float, early_s: float) -> None:
    times = beats(wait_s, early_s)
    assert [b - a for a, b in pairwise(times)] == pytest.approx([wait_s] * 49)
    assert all(
        abs((time + early_s) / timer_coalescing.ALIGN_S - round((time + early_s) / timer_coalescing.ALIGN_S)) < 1e-6
        for time in times
    )


def test_stages_in_steady_work_tick_together_and_once() -> None:
    align_s = timer_coalescing.STEADY_ALIGN_S
    for late_s in (0.0, 0.001, 0.025, -0.02):  # a tick may be early, or late by what it waits for a frame
        now, times = 1234.321, []
        for _ in range(20):
            now += timer_coalescing.until_aligned(now, align_s, align_s) + late_s
            times.append(now - late_s)
        assert [b - a for a, b in pairwise(times)] == pytest.approx([align_s] * 19)
        assert all(abs(time / align_s - round(time / align_s)) < 1e-6 for time in times)


def test_a_wait_is_bounded() -> None:
    chance = random.Random(5)
    for _ in range(1000):
        now, wait_s = chance.uniform(0, 1e6), chance.uniform(timer_coalescing.ALIGN_S, 10)
        assert 0 < timer_coalescing.until_aligned(now, wait_s) <= wait_s + timer_coalescing.ALIGN_S / 8 + 1e-6


def test_a_period_elapses_once_for_every_aligned_process() -> None:
    for early_s in (0.0, 0.001, 0.04, -0.04):
        before, turned = float("-inf"), []
        for time in beats(timer_coalescing.ALIGN_S, early_s):
            if timer_coalescing.has_period_elapsed(time, before, timer_coalescing.IDLE_HEARTBEAT_S):
                turned.append(round((time + early_s) / timer_coalescing.ALIGN_S))
                before = time
        each = round(timer_coalescing.IDLE_HEARTBEAT_S / timer_coalescing.ALIGN_S)
        assert len(turned) > 10
        assert all(beat % each == 0 for beat in turned[1:]), "the same moments for all"
        assert {b - a for a, b in pairwise(turned[1:])} == {each}
