"""An empty home for commands, and a published model on a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.catalog.entry import Entry
from pipeline.catalog.publish import publish
from pipeline.coordination.interface import CoordinationStore
from pipeline.coordination.memory import MemoryStore
from tests.fleet.checkpoints import write_checkpoint
from tests.fleet.coordination_stores import Clock, make_store
from tests.fleet.range_server import served
from tests.fleet.site import NBYTES, Site
from tests.fleet.store_fixtures import bucket, container, etcd, redis  # noqa: F401  fixtures


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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "etcd", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[CoordinationStore]:
    async with make_store(request, tmp_path, clock) as made:
        yield made


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def timed(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[CoordinationStore]:
    """A store with the test's clock."""
    async with make_store(request, tmp_path, clock) as made:
        yield made


@pytest.fixture(params=["sqlite", "etcd", "redis"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The argument with which a process opens the store of a test: `fleet.store`."""
    if request.param == "sqlite":
        return [f"sqlite:{tmp_path / 'c.db'}"]
    return [f"{request.param}://127.0.0.1:{request.getfixturevalue(request.param).port}/{tmp_path.name}"]


@pytest.fixture
async def records_store(clock: Clock) -> AsyncIterator[MemoryStore]:
    """A coordination store of this process."""
    async with MemoryStore(clock, 100) as store:
        yield store
