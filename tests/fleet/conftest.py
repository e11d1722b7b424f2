"""An empty home for commands, and a published model on a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.catalog.entry import Entry
from pipeline.catalog.publish import publish
from tests.fleet.checkpoints import write_checkpoint
from tests.fleet.range_server import served
from tests.fleet.site import NBYTES, Site


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty STARLING_HOME and no other setting."""
    for name in [name for name in os.environ if name.startswith(("STARLING_", "LLM_ENGINE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Entry]:
    root = tmp_path_factory.mktemp("blobs")
    path, _ = write_checkpoint(tmp_path_factory.mktemp("prepared"), NBYTES)
    done = asyncio.run(publish(FolderStore(root), path, "tiny", "tiny.gguf", 0, lambda phase, done, total: None))
    return root, done.entry


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backoff as it is, in hundredths."""
    monkeypatch.setattr("pipeline.blobs.retry.FIRST_S", 0.0025)
    monkeypatch.setattr("pipeline.blobs.retry.MOST_S", 0.2)


@pytest.fixture
def site(published: tuple[Path, Entry], short_pauses: None, tmp_path: Path) -> Iterator[Site]:
    root, entry = published
    with served(root) as server:
        yield Site(root, entry, server, tmp_path / "models")
