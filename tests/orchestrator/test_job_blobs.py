"""Blobs of requests in the background that were not taken: they are removed, unless a record may name them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import Overloaded, StorageUnavailable
from stages.orchestrator.responses.jobs import Job, Jobs
from tests.orchestrator.test_response_jobs import Orchestrator, Wall, check_blobs, job


@pytest.fixture
async def orchestrators(tmp_path: Path) -> AsyncIterator[tuple[Orchestrator, Orchestrator]]:
    wall = Wall()
    made = Orchestrator(tmp_path, "one", wall), Orchestrator(tmp_path, "two", wall)
    yield made
    for one in made:
        await one.close()


async def test_of_two_attempts_at_once_the_blob_of_one_stays(
    orchestrators: tuple[Orchestrator, Orchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both orchestrators have written a blob before either adds a record."""
    one, have_written, write = job(), asyncio.Barrier(2), Jobs.write

    async def written(jobs: Jobs, given: Job) -> str:
        blob = await write(jobs, given)
        await have_written.wait()
        return blob

    monkeypatch.setattr(Jobs, "write", written)
    shown = await asyncio.gather(*(orchestrator.background.begin(one) for orchestrator in orchestrators))
    assert shown == [one.shown] * 2
    await check_blobs(orchestrators[0])
    for orchestrator in orchestrators:
        orchestrator.may_end.set()
    assert await orchestrators[0].ended(one) == "completed"


async def test_the_blob_of_a_client_that_leaves_before_its_turn_is_removed(tmp_path: Path) -> None:
    only = Orchestrator(tmp_path, "one", Wall())
    await only.background._adding.acquire()
    task = asyncio.ensure_future(only.background.begin(job()))
    while not (await only.blobs.scan("jobs") and only.background._adding._waiters):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_blobs(only)
    await only.close()


@pytest.mark.parametrize("is_slow", [True, False])
async def test_a_blob_that_is_stored_after_its_client_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """As in the folder store, `put` ends although it is cancelled: by the client that leaves, or by the time limit."""
    only = Orchestrator(tmp_path, "one", Wall())
    has_begun, never, put = asyncio.Event(), asyncio.Event(), only.blobs.put

    async def blocked(name: str, data: bytes) -> None:
        has_begun.set()
        try:
            await never.wait()
        finally:
            await put(name, data)

    monkeypatch.setattr(only.blobs, "put", blocked)
    if is_slow:
        monkeypatch.setattr("stages.orchestrator.responses.jobs.PUT_S", 0.01)
    task = asyncio.ensure_future(only.background.begin(job()))
    await has_begun.wait()
    if not is_slow:
        task.cancel()
    (found,) = await asyncio.gather(task, return_exceptions=True)
    assert type(found) is (StorageUnavailable if is_slow else asyncio.CancelledError)
    assert not await only.blobs.scan("jobs")
    await only.close()


@pytest.mark.parametrize("is_applied", [True, False])
async def test_a_blob_stays_whose_record_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_applied: bool
) -> None:
    """The store does not answer to the transaction that adds the record."""
    only = Orchestrator(tmp_path, "one", Wall())
    transact = only.store.transact

    async def lost(*given: Any) -> int | None:
        if is_applied:
            await transact(*given)
        raise StorageUnavailable("no answer")

    monkeypatch.setattr(only.store, "transact", lost)
    with pytest.raises(StorageUnavailable):
        await only.background.begin(job())
    assert len(await only.blobs.scan("jobs")) == 1
    assert await only.jobs.find(job().request_id, "a") == (job() if is_applied else None)
    monkeypatch.undo()
    await only.close()


async def test_a_refusal_is_answered_although_its_blob_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = Orchestrator(tmp_path, "one", Wall())

    async def refused(*given: Any) -> bool:
        raise Overloaded("too many", "background", retry_after_s=1.0)

    async def fail(blob: str) -> None:
        raise StorageUnavailable("no answer")

    monkeypatch.setattr(only.jobs, "add", refused)
    monkeypatch.setattr(only.blobs, "delete", fail)
    with pytest.raises(Overloaded, match="too many"):
        await only.background.begin(job())
    await only.close()
