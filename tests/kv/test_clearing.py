"""The steps of `starling kv clear` in one process; test_clear.py has those of a real one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from shm.prefix_hash import PageHash
from stages.kv.clearing import Clearing


class Store:
    """A page file of one page."""

    def __init__(self, is_open: bool) -> None:
        self.is_open, self.is_closing, self.is_removing, self.error = is_open, False, False, None
        self.report: Callable[[list[PageHash]], object] | None = None
        self.removed: list[PageHash] = []
        self.remove = self.removed.append

    def list_pages(self, wants: object, on_listed: Callable[[list[PageHash]], object]) -> bool:
        self.report = on_listed
        return self.is_open


def begin(store: Store) -> Clearing:
    table = SimpleNamespace(total=0, may_free=True, get_cached_page=lambda page_hash: None)
    pages: Any = SimpleNamespace(
        manager=SimpleNamespace(pool=SimpleNamespace(table=table, headers=None, shrink=lambda: None)),
        geometry=SimpleNamespace(page_bytes=1),
        model=SimpleNamespace(name="m"),
        stores=lambda: [store],
    )
    clearing = Clearing([pages], None, frozenset())
    for _ in range(3):
        assert not clearing.step()
        assert not clearing.is_done
    return clearing


def test_a_file_that_is_closed_meanwhile_is_not_waited_for() -> None:
    """Its version was unloaded: a clear that never ended would refuse all further ones, and prefixes of others."""
    store = Store(is_open=True)
    clearing = begin(store)
    store.is_closing = True
    for _ in range(3):
        assert not clearing.step()
    assert clearing.is_done
    assert [one.disk for one in clearing.reports] == [0]


def test_a_file_that_is_being_opened_is_waited_for() -> None:
    """A disk may be slow at the start: its pages would come back."""
    store = Store(is_open=False)
    clearing = begin(store)
    store.is_open = True
    assert not clearing.step()
    assert store.report is not None
    store.report([PageHash(b"x")])
    while not clearing.is_done:
        clearing.step()
    assert store.removed == [b"x"]
    assert [one.disk for one in clearing.reports] == [1]
