"""Versions of models that are opened and removed as the record says."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shm.arena import ArenaError
from stages.kv import loaded_versions
from stages.kv.loaded_versions import LoadedVersions


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
