"""Requests in the background, as orchestrators share them: who runs them, and what is left when one dies."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.api.fair_shares import FairShares
from pipeline.api.held_bytes import body_shares
from pipeline.api.requests.readers import READERS
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import response_id_of
from pipeline.blobs.folder import FolderStore
from pipeline.config.schema import ServerConfig, StoredResponsesConfig
from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.errors import (
    Conflict,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    NotFound,
    Overloaded,
    ResourceError,
    StarlingError,
    StorageUnavailable,
)
from stages.orchestrator.forward import NotRepeated
from stages.orchestrator.request_ids import RequestIds
from stages.orchestrator.responses import background
from stages.orchestrator.responses.background import MAX_OF_TENANT, Background, Begun, KeepJob
from stages.orchestrator.responses.heads import Heads
from stages.orchestrator.responses.jobs import ABANDONED_S, Job, Jobs, Opened
from stages.orchestrator.responses.service import Responses
from stages.orchestrator.responses.shared import SharedResponses
from stages.orchestrator.responses.tenant_blobs import TenantBlobs
from stages.orchestrator.responses.use import ResponseUse

MIB = 1 << 20
KEPT = KeptResponse(msgspec.msgpack.encode([{"role": "user", "content": "x"}]), b"[]")


class Wall:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def job(number: int = 1, tenant: str = "a", **fields: Any) -> Job:
    name = f"req-{number:024x}"
    shown: dict[str, Any] = {"id": response_id_of(name), "status": "queued", "output": [], "usage": None}
    given: dict[str, Any] = {
        "request_id": name,
        "tenant": tenant,
        "key_id": "",
        "model": "m",
        "body": b"{}",
        "headers": {},
        "is_stream": False,
        "prompt_bytes": 1,
        "blocks": (),
        "at": 1_000_000.0,
        "digest": b"d",
        "shown": msgspec.json.encode(shown),
        "conversation": b"\x90",
        "inputs": b"[]",
        **fields,
    }
    given["shown"] = msgspec.json.encode({**shown, "id": response_id_of(given["request_id"])})
    return Job(**given)


class Orchestrator:
    """What one has; several share a path. `answers` decides what the engines do."""

    def __init__(
        self, path: Path, name: str, wall: Wall, max_open: int = 100, bodies: FairShares | None = None
    ) -> None:
        self.store = SqliteStore(path / "fleet.db")
        self.blobs = FolderStore(path / "responses")
        use = ResponseUse(self.store, 64 * MIB, 256 * MIB, wall)
        place = TenantBlobs(self.blobs, use, Heads(self.store), StoredResponsesConfig(), wall)
        self.jobs = Jobs(self.store, self.blobs, wall)
        self.shared = SharedResponses(place, self.jobs, self.store, wall)
        self.responses = self.shared.store
        self.began: list[str] = []
        self.n_kept = 0
        self.may_end = asyncio.Event()
        self.failure: StarlingError | None = None
        self.absences: list[StarlingError] = []  # of agents, one for each attempt
        self.background = Background(
            self.store,
            self.jobs,
            self.responses,
            self.shared.keeper,
            self.answer,
            name,
            wall,
            timeout_s=60.0,
            max_open=max_open,
            bodies=bodies,
        )

    async def answer(self, job: Job, out: Begun, keep: KeepJob) -> bytes:
        self.began.append(job.request_id)
        out.begin(200, {})  # of a comment
        await out.write(b": waiting\n\n")
        if self.absences:
            raise self.absences.pop()
        await out.write(b"data: {}\n\n")
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        await keep(job, msgspec.json.encode({"id": job.name, "status": "completed"}), KEPT)
        self.n_kept += 1
        return b""

    async def status(self, one: Job) -> str:
        found = await self.responses.get(one.tenant, one.name)
        return msgspec.json.decode(found.body)["status"] if found is not None else ""

    async def ended(self, one: Job) -> str:
        """The status with which a response has ended."""
        while not (status := await self.status(one)) or await self.jobs.find(one.request_id, one.tenant) is not None:
            await asyncio.sleep(0)
        return status

    async def close(self) -> None:
        await self.background.close()
        await self.store.close()


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Orchestrator, Orchestrator]]:
    wall = Wall()
    made = Orchestrator(tmp_path, "one", wall), Orchestrator(tmp_path, "two", wall)
    yield made
    for one in made:
        await one.close()


async def test_a_request_is_run_once_and_its_response_stored(both: tuple[Orchestrator, Orchestrator]) -> None:
    first, second = both
    looking = [asyncio.ensure_future(one.background.run()) for one in both]
    one = job()
    assert msgspec.json.decode(await first.background.begin(one))["status"] == "queued"
    await first.background.begun(one.request_id)
    assert await second.background.find("a", one.name) == one
    assert await second.background.find("b", one.name) is None
    for orchestrator in both:
        orchestrator.may_end.set()
    assert await second.ended(one) == "completed"
    assert first.began + second.began == [one.request_id]  # the other one may have found it before
    assert await first.blobs.scan("jobs") == []
    for task in looking:
        task.cancel()


async def test_the_client_of_a_stream_waits_for_the_orchestrator_that_has_taken_its_request(
    both: tuple[Orchestrator, Orchestrator],
) -> None:
    """The other one has found it before this one, and has not sent it to an engine yet."""
    first, second = both
    one, asked = job(), 0

    async def find() -> str:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise NotFound("no engine has it")
        return "ticket"

    assert await first.jobs.add(one, await first.jobs.write(one))
    second.background._take(one.request_id, one.tenant)
    await second.background.begun(one.request_id)
    first.background._take(one.request_id, one.tenant, is_new=True)
    assert await first.background.once_begun(one.request_id, find) == "ticket" and first.began == []
    second.may_end.set()
    assert await first.ended(one) == "completed"
    asked = 0
    with pytest.raises(NotFound):
        await first.background.once_begun(one.request_id, find)


async def test_the_other_one_runs_what_a_closed_one_leaves(both: tuple[Orchestrator, Orchestrator]) -> None:
    first, second = both
    one = job()
    await first.background.begin(one)
    await first.background.begun(one.request_id)
    await first.background.close()
    second.may_end.set()
    looking = asyncio.ensure_future(second.background.run())
    assert await second.ended(one) == "completed" and second.began == [one.request_id]
    looking.cancel()


async def test_a_request_that_fails_has_a_response_that_says_so(both: tuple[Orchestrator, Orchestrator]) -> None:
    first, second = both
    first.failure = InvalidRequest("too long", "input")
    first.may_end.set()
    one = job()
    await first.background.begin(one)
    assert await second.ended(one) == "failed"
    found = await second.responses.get("a", one.name)
    assert found is not None and msgspec.json.decode(found.body)["error"]["code"] == "invalid_prompt"


async def test_a_request_whose_response_was_not_stored_is_run_again(both: tuple[Orchestrator, Orchestrator]) -> None:
    first, second = both
    first.failure = StorageUnavailable("the disk is full")
    first.may_end.set()
    one = job()
    await first.background.begin(one)
    second.may_end.set()
    looking = asyncio.ensure_future(second.background.run())
    assert await second.ended(one) == "completed"
    looking.cancel()


@pytest.mark.parametrize("error", [ModelUnavailable, Overloaded, ModelNotFound])
async def test_a_request_waits_for_an_agent(
    both: tuple[Orchestrator, Orchestrator], error: type[StarlingError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    first, _ = both
    first.absences = [error("no agent is there") for _ in range(3)]  # type: ignore[call-arg]
    one = job()
    await first.background.begin(one)
    await first.background.begun(one.request_id)  # the client of a stream waits, too
    assert first.absences == []
    first.may_end.set()
    assert await first.ended(one) == "completed" and len(first.began) == 4


async def test_a_request_that_kills_engines_fails(both: tuple[Orchestrator, Orchestrator]) -> None:
    first, _ = both
    first.absences = [NotRepeated("the engines died")]
    one = job()
    await first.background.begin(one)
    assert await first.ended(one) == "failed" and len(first.began) == 1


async def test_what_is_complete_is_not_run_again_when_the_disk_is_full(
    both: tuple[Orchestrator, Orchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    first, _ = both
    one, faults = job(), [ResourceError("the disk is full") for _ in range(3)]
    await first.background.begin(one)
    await first.background.begun(one.request_id)
    put = first.blobs.put

    async def put_later(key: str, data: bytes) -> None:
        if faults:
            raise faults.pop()
        await put(key, data)

    first.blobs.put = put_later  # type: ignore[assignment,method-assign]
    first.may_end.set()
    assert await first.ended(one) == "completed" and len(first.began) == 1 and not faults


async def test_a_request_whose_time_is_over_fails(tmp_path: Path) -> None:
    wall = Wall()
    only = Orchestrator(tmp_path, "one", wall)
    wall.now += 61
    one = job()
    await only.background.begin(one)
    assert await only.ended(one) == "failed"
    await only.close()


async def test_a_cancelled_request_keeps_its_status(both: tuple[Orchestrator, Orchestrator]) -> None:
    first, second = both
    one = job()
    await first.background.begin(one)
    await first.background.begun(one.request_id)
    running = msgspec.json.encode({"id": one.name, "status": "in_progress", "output": [1]})
    await second.background.cancel(one, running)
    first.may_end.set()
    assert await first.ended(one) == "cancelled"
    await first.background.close()
    assert await second.status(one) == "cancelled"


async def test_a_repeated_key_is_one_request(both: tuple[Orchestrator, Orchestrator]) -> None:
    first, second = both
    one = job()
    for orchestrator in (first, second, first):
        await orchestrator.background.begin(one)
    with pytest.raises(Conflict, match="another body"):
        await second.background.begin(job(digest=b"e"))
    first.may_end.set()
    second.may_end.set()
    await first.ended(one)
    assert msgspec.json.decode(await second.background.begin(one))["status"] == "completed"
    with pytest.raises(Conflict, match="another body"):
        await second.background.begin(job(digest=b"e"))
    assert len(first.began) + len(second.began) == 1


async def test_requests_are_bounded_for_each_tenant_and_in_all(tmp_path: Path) -> None:
    only = Orchestrator(tmp_path, "one", Wall(), max_open=24)
    for number in range(MAX_OF_TENANT):
        await only.background.begin(job(number))
    with pytest.raises(Overloaded, match="16 requests in the background"):
        await only.background.begin(job(99))
    for number in range(5):
        await only.background.begin(job(100 + number, "b"))
    with pytest.raises(Overloaded, match="the most of all tenants"):
        await only.background.begin(job(200, "b"))
    await only.background.begin(job(201, "c"))  # a reserve for those that have none
    await only.close()


async def test_bytes_of_bodies_that_run_are_bounded_for_each_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait, also at an orchestrator that finds them; a stream's client would wait with them."""
    monkeypatch.setattr(background, "CHECK_S", 0.01)
    sent = [job(number, tenant, body=bytes(MIB)) for number, tenant in enumerate("aaab")]
    shares = [body_shares(ServerConfig(max_body_mb=1, body_buffer_mb=4)) for _ in range(2)]
    first, second = (
        Orchestrator(tmp_path, name, Wall(), bodies=bodies) for name, bodies in zip(("one", "two"), shares)
    )
    for one in sent:
        await first.background.begin(one)
    with pytest.raises(Overloaded, match=r"server.body_buffer_mb\): at most 2 MiB for one client, 4 MiB in all"):
        await first.background.begin(job(9, "a", body=bytes(MIB), is_stream=True))
    taken = [sent[number].request_id for number in (0, 1, 3)]
    assert list(first.background._tasks) == taken and shares[0].held_by("a") == 2 * MIB
    await first.background.close()
    assert shares[0].held == 0
    looking = asyncio.ensure_future(second.background.run())
    while len(second.began) < 3:
        await asyncio.sleep(0)
    assert sorted(second.began) == taken and shares[1].held_by("a") == 2 * MIB
    second.may_end.set()
    assert [await second.ended(one) for one in sent] == ["completed"] * 4
    looking.cancel()
    for orchestrator in (first, second):
        await orchestrator.close()
    assert shares[1].held == 0


@pytest.mark.parametrize(("tenants", "max_open"), [("a" * 17, 100), ("abcdefghijklmnopq", 16)])
async def test_bounds_hold_for_orchestrators_that_admit_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tenants: str, max_open: int
) -> None:
    """Of a tenant, and of all: both orchestrators count before either adds its request."""
    wall = Wall()
    first, second = (Orchestrator(tmp_path, name, wall, max_open) for name in ("one", "two"))
    for number in range(15):
        await first.background.begin(job(number, tenants[number]))
    have_counted = asyncio.Barrier(2)
    n_counts: Counter[Jobs] = Counter()
    count = Jobs.all

    async def counted(jobs: Jobs) -> list[Opened]:
        found = await count(jobs)
        n_counts[jobs] += 1
        if n_counts[jobs] == 2:  # the first time is before the request is written
            await have_counted.wait()
        return found

    monkeypatch.setattr(Jobs, "all", counted)
    attempts = (one.background.begin(job(15 + n, tenants[15 + n])) for n, one in enumerate((first, second)))
    found = await asyncio.gather(*attempts, return_exceptions=True)
    assert {type(one) for one in found} == {bytes, Overloaded}, found
    assert len(await count(first.jobs)) == MAX_OF_TENANT
    await check_blobs(first)
    for one in (first, second):
        await one.close()


async def test_blobs_beside_their_record_are_removed_later(tmp_path: Path) -> None:
    wall = Wall()
    only = Orchestrator(tmp_path, "one", wall)
    await only.jobs.add(job(1), await only.jobs.write(job(1)))
    await only.jobs.add(job(2), await only.jobs.write(job(2)))
    (lost,) = [blob.key for blob in await only.blobs.scan("jobs") if f"{2:024x}" in blob.key]
    for blob in await only.blobs.scan("jobs"):
        os.utime(only.blobs.path(blob.key), (wall.now, wall.now))
    await only.store.swap(*_record_of(await only.store.scan("responses/open/"), 2), None)
    await only.jobs.sweep(60.0)
    assert lost in [blob.key for blob in await only.blobs.scan("jobs")]
    wall.now += ABANDONED_S + 1
    await only.jobs.sweep(60.0)
    assert [f"{1:024x}" in blob.key for blob in await only.blobs.scan("jobs")] == [True]
    await only.close()


async def test_a_record_whose_blob_is_gone_ends(tmp_path: Path) -> None:
    wall = Wall()
    only = Orchestrator(tmp_path, "one", wall)
    await only.jobs.add(job(), await only.jobs.write(job()))
    (blob,) = await only.blobs.scan("jobs")
    await only.blobs.delete(blob.key)
    await only.jobs.sweep(60.0)
    assert await only.jobs.is_open(job().request_id)
    wall.now += 61 + ABANDONED_S
    await only.jobs.sweep(60.0)
    assert not await only.jobs.is_open(job().request_id)
    await only.close()


async def test_a_deleted_response_is_not_stored_again(both: tuple[Orchestrator, Orchestrator]) -> None:
    """By those who read its stream once more."""
    first, second = both
    ids = RequestIds("secret", Wall())
    services = [Responses(one.shared, ids) for one in both]
    for service, one in zip(services, both):
        service.background = one.background
    open_job = job(request_id=ids.new("a"))
    await first.background.begin(open_job)
    await first.background.begun(open_job.request_id)
    body = msgspec.json.encode({"id": open_job.name, "status": "completed"})
    await services[1].keep("a", body, KEPT, is_again=True)  # a reader is faster than who runs it
    await second.background.begin(open_job)
    with pytest.raises(Conflict, match="another body"):
        await second.background.begin(job(request_id=open_job.request_id, digest=b"e"))
    await services[1].delete("a", open_job.name)
    first.may_end.set()
    await services[0].keep("a", body, KEPT, is_again=True)
    while not first.n_kept:
        await asyncio.sleep(0)
    assert await first.status(open_job) == ""
    assert await second.background.find("a", open_job.name) is None


async def test_a_cancelled_request_stops_although_its_conversation_cannot_be_changed(
    both: tuple[Orchestrator, Orchestrator],
) -> None:
    """What is left of it is withdrawn by who finds the request again, and it is not run again."""
    first, second = both
    made = await first.shared.conversations.create("a", b"{}", [])
    one = job()
    shown = {**msgspec.json.decode(one.shown), "conversation": {"id": made.id}}
    one = msgspec.structs.replace(one, shown=msgspec.json.encode(shown))
    await first.background.begin(one)
    await first.background.begun(one.request_id)
    withdraw, stopped = first.shared.conversations.withdraw_response, []

    async def fail(*arguments: Any) -> None:
        raise StorageUnavailable("the store does not answer")

    async def stop() -> None:
        stopped.append(one.request_id)

    first.shared.conversations.withdraw_response = fail  # type: ignore[method-assign]
    with pytest.raises(StorageUnavailable):
        await first.background.cancel(one, None, stop)
    assert stopped == [one.request_id] and await first.status(one) == "cancelled"
    first.shared.conversations.withdraw_response = withdraw  # type: ignore[method-assign]
    looking = asyncio.ensure_future(second.background.run())
    assert await second.ended(one) == "cancelled" and second.began == []
    assert (await second.shared.conversations.get("a", made.id)).has_had(one.name)
    looking.cancel()


async def test_a_key_of_a_request_in_the_background_is_refused_for_another_one(
    both: tuple[Orchestrator, Orchestrator],
) -> None:
    first, second = both
    one = job()
    await first.background.begin(one)
    generation = READERS["responses"]({"model": "m", "input": "x"})
    with pytest.raises(Conflict, match="'k' was sent with another body"):
        await Responses(second.shared, RequestIds("secret", Wall())).check_key(
            generation, "a", one.request_id, "k", b"e" * 32
        )


def _record_of(found: Any, number: int) -> tuple[str, int]:
    (item,) = [item for item in found[0] if item.key.endswith(f"{number:024x}")]
    return item.key, item.revision


async def check_blobs(one: Orchestrator) -> None:
    """Each record has its blob, and there are no others."""
    assert sorted(blob.key for blob in await one.blobs.scan("jobs")) == sorted(r.blob for r in await one.jobs.all())
