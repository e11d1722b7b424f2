"""When a busy worker reads its control socket."""

from __future__ import annotations

import pytest

from stages.worker.control_polls import (
    LONGEST_POLL_MS,
    SHORTEST_POLL_MS,
    STOPPING_POLL_NS,
    next_poll_ns,
    poll_every_ns,
)

NOW = 10**12


def test_a_stage_that_is_stopping_reads_its_socket_sooner() -> None:
    planned = NOW + poll_every_ns(250)
    assert next_poll_ns(NOW, planned, False) == planned
    assert next_poll_ns(NOW, planned, True) == NOW + STOPPING_POLL_NS < planned


@pytest.mark.parametrize(
    ("heartbeat_ms", "expected_ms"), [(10, SHORTEST_POLL_MS), (200, 200), (60_000, LONGEST_POLL_MS)]
)
def test_a_busy_worker_reads_its_socket_once_for_each_heartbeat(heartbeat_ms: int, expected_ms: int) -> None:
    assert poll_every_ns(heartbeat_ms) == expected_ms * 1_000_000


def test_a_read_is_never_postponed() -> None:
    for planned in (NOW - 1, NOW, NOW + STOPPING_POLL_NS // 2):
        assert next_poll_ns(NOW, planned, True) == next_poll_ns(NOW, planned, False) == planned
