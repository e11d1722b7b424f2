"""When a busy worker reads its control socket."""

from __future__ import annotations

from stages.worker.control_polls import POLL_EVERY_NS, STOPPING_POLL_NS, next_poll_ns

NOW = 10**12


def test_a_stage_that_is_stopping_reads_its_socket_sooner() -> None:
    planned = NOW + POLL_EVERY_NS
    assert next_poll_ns(NOW, planned, False) == planned
    assert next_poll_ns(NOW, planned, True) == NOW + STOPPING_POLL_NS < planned


def test_a_read_is_never_postponed() -> None:
    for planned in (NOW - 1, NOW, NOW + STOPPING_POLL_NS // 2):
        assert next_poll_ns(NOW, planned, True) == next_poll_ns(NOW, planned, False) == planned
