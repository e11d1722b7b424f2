"""Which errors of a download make an agent degraded: those of its own disk, and not a bound that it keeps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.catalog import contents
from pipeline.config.load import resolve
from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.errors import ResourceError, StarlingError, StorageUnavailable
from pipeline.fleet.bodies import LoadModelRequest
from pipeline.fleet.records import AgentRecord
from stages.agent.heartbeat import Reporter
from stages.agent.lease import AgentLease
from stages.agent.models import Models
from stages.agent.state_file import Stored
from tests.fleet.agent_process import publish_tiny


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blobs")
    publish_tiny(tmp_path_factory.mktemp("published"), folder)
    return folder


async def reasons_after_load(home: Path, blobs: Path, fleet: dict[str, Any]) -> tuple[StarlingError, list[str]]:
    """What a load fails with, and what the agent then reports."""
    none: Any = None
    stored = Stored(agent_id="one", incarnation="first")
    record = AgentRecord(agent_id="one", incarnation="first", url="http://127.0.0.1:1")
    config = resolve({"fleet": {"blobs": str(blobs), **fleet}}, {})
    loop = asyncio.get_running_loop()
    async with SqliteStore(home / "fleet.db") as coordination:
        lease = AgentLease(coordination, record, 60.0, "", clock=loop.time)
        holding = asyncio.create_task(lease.hold())
        stores = [FolderStore(blobs)]
        models = Models(config, home / "agent", home / "models", stored, stores, none, none, lambda: True)
        reporter = Reporter(config, stored, models, lease)
        while not lease.is_valid:
            await asyncio.sleep(0)
        placement = await models.place(LoadModelRequest(model_id="tiny"))
        try:
            with pytest.raises(StarlingError) as failed:
                await placement.wait()
            return failed.value, reporter.reasons()
        finally:
            await models.stop()
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)


async def test_a_disk_that_fails_makes_an_agent_degraded(tmp_path: Path, blobs: Path) -> None:
    entry = await contents.find(FolderStore(blobs), "tiny")
    unfinished = tmp_path / "models" / ".fetch"
    unfinished.mkdir(parents=True)
    (unfinished / f"{entry.digest}.bin.part").symlink_to("/dev/full")  # it opens, and no room can be reserved in it
    failure, reasons = await reasons_after_load(tmp_path, blobs, {})
    assert isinstance(failure, StorageUnavailable), failure
    assert reasons == [failure.message]
    assert "check the disk" in failure.message


async def test_a_model_that_does_not_fit_makes_no_agent_degraded(tmp_path: Path, blobs: Path) -> None:
    failure, reasons = await reasons_after_load(tmp_path, blobs, {"free_mb": 1 << 24})
    assert isinstance(failure, ResourceError), failure
    assert "fleet.free_mb" in failure.message
    assert reasons == []
