"""Python's garbage collector is paused for imports, and no longer."""

from __future__ import annotations

import gc

import pytest

from pipeline.runtime.paused_collector import paused_collector


def fail_within() -> None:
    with paused_collector():
        assert not gc.isenabled()
        raise ImportError


def test_it_collects_again_afterwards_also_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail_within()
    assert gc.isenabled()


def test_a_process_without_collections_stays_so() -> None:
    gc.disable()
    try:
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
