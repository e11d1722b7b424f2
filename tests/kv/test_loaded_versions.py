"""Versions of models that are opened and removed as the record says."""

from __future__ import annotations

import contextlib
import gc
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import paths
from shm.arena import ArenaError
from stages.kv import loaded_versions
from stages.kv.clearing import Clearing
from stages.kv.loaded_versions import LoadedVersions
from stages.kv.model import ModelPages
from tests.kv.process import MODEL, WAIT_S, configure, load_config, write_model


def test_an_arena_that_could_not_be_created_is_created_later_by_a_version_that_serves_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record says that it serves before the thread's error was taken: this process is a successor."""
    monkeypatch.setattr(loaded_versions.versions, "find_index", lambda version, folder: Path("tiny.idx"))
    failed: Future[Any] = Future()
    failed.set_exception(ArenaError("no space left"))
    opened: list[Any] = []
    pages = SimpleNamespace(
        open=lambda index, reserved, is_alone: opened.append(reserved), open_sessions=lambda: opened.append("sessions")
    )
    loaded: Any = SimpleNamespace(
        name="tiny", version=SimpleNamespace(state="serving", digest="d"), pages=pages, reserving=failed, error=""
    )
    versions: Any = SimpleNamespace(
        _loop=SimpleNamespace(allow_stall=lambda seconds: contextlib.nullcontext()), _may_open_files=lambda one: True
    )
    with pytest.raises(ArenaError, match="no space left"):
        LoadedVersions._try_open(versions, loaded)
    assert LoadedVersions._try_open(versions, loaded) == ""
    assert opened == [None, "sessions"]


def test_a_version_that_was_cleared_and_removed_leaves_no_memory(tmp_path: Path) -> None:
    """The stage keeps the last clear for its report, which must lead to no arena."""
    configure(tmp_path, spill_path=str(tmp_path / "spill"), spill_mb=8)
    digest = write_model(tmp_path)
    config = load_config(tmp_path)
    pages = ModelPages(config, config.model(MODEL))
    pages.open(tmp_path / "models" / f"{digest}.idx")
    name = str(paths.arena_dir(config))
    assert name in Path("/proc/self/maps").read_text()
    clearing = Clearing([pages], None, frozenset())
    deadline = time.monotonic() + WAIT_S
    while not clearing.is_done:
        assert time.monotonic() < deadline
        if not clearing.step():
            pages.poll_stores()
    loaded: Any = SimpleNamespace(reserving=None, pages=pages, version=SimpleNamespace(id=MODEL))
    manager, pages.manager = pages.manager, None
    loaded_versions._remove_arena(loaded, manager)
    del loaded, manager, pages
    while name in Path("/proc/self/maps").read_text():
        assert time.monotonic() < deadline, "the arena is still mapped"
        gc.collect()
    assert len(clearing.reports) == 1
