"""Page tables are checked before a worker may use them."""

from __future__ import annotations

import pytest

from pipeline.protocol.messages import Granted, KvReady
from stages.scheduler.core.leases import BadTableError, Leases
from stages.scheduler.core.run_state import RunState

from .builders import sequence


def leased(pages: int = 8) -> tuple[Leases, RunState]:
    leases = Leases("m")
    leases.kv_ready(KvReady("m", "", "", pages, 16, 1), [])
    run = sequence(n=20).run
    run.row = 0
    leases.acquire(run, "")
    return leases, run


@pytest.mark.parametrize(
    ("pages", "cached", "reason"),
    [
        ((0, 8), 0, "outside"),
        ((0, -1), 0, "outside"),
        ((3, 3), 0, "twice"),
        ((1, 2), 20, "cached"),
        ((1, 2), -1, "cached"),
        ((1,), 17, "cached"),
    ],
)
def test_an_invalid_page_table_is_refused(pages, cached, reason):
    leases, run = leased()
    with pytest.raises(BadTableError, match=reason):
        leases.store_table(run, Granted(1, "a", pages, cached))
    assert run.pages == ()


def test_pages_in_use_never_change():
    leases, run = leased()
    leases.store_table(run, Granted(1, "a", (1, 2)))
    with pytest.raises(BadTableError, match="replaced"):
        leases.store_table(run, Granted(2, "a", (2, 1, 3)))
    leases.store_table(run, Granted(2, "a", (1, 2, 3)))
    assert run.leased == 48


def test_an_answer_to_a_forgotten_request_is_ignored():
    leases, run = leased()
    leases.release(run)
    assert leases.pop_request(1) is None
    assert leases.unanswered == 0
