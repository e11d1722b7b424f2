"""Requests for responses in the background, as orchestrators share them until they have ended.

    responses/open/ID   in the coordination store: whose it is, since when, and the name of its blob
    responses/admitted  likewise: changes with each record that is added
    jobs/ID-RANDOM      in the blob store: the request as engines get it

The record comes after the blob, and goes before it: a record without a blob is one that has just ended.  Each attempt
to add a request writes a blob of its own, which it removes if it has added no record.
An orchestrator adds a record only if `responses/admitted` is as it was before the records were counted: so bounds on
their number hold for all orchestrators together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pipeline.api.request_name import HEADER as NAME
from pipeline.api.request_name import RequestName, read_request_name
from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields
from pipeline.api.response_object import make_response, response_id_of
from pipeline.blobs.interface import BlobStore
from pipeline.coordination.interface import Change, Condition, CoordinationStore
from pipeline.errors import NotFound, ResourceError, StarlingError, StorageUnavailable
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.responses.tenant_blobs import inline_or_not
from stages.orchestrator.responses.use import PREFIX

log = logging.getLogger("starling.orchestrator")

OPEN = f"{PREFIX}open/"
ADMITTED = f"{PREFIX}admitted"
FOLDER = "jobs"
MAX_JOB_BYTES = 128 << 20
PUT_S = 60.0  # for the blob store to take a request
ABANDONED_S = 3600.0  # age of a blob without a record after which it is removed
TRIES = 64  # of a record's addition while other orchestrators add theirs
TRY_PAUSE_S = 0.05  # at most, between two of them: those of several orchestrators must not stay in step


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a record. Tenants' names are no secret of the store: quotas and agents have them, too."""

    tenant: str
    at: float  # s since 1970
    blob: str
    conversation: str = ""  # that the response continues; "": none
    digest: str = ""  # of the client's body; "" also from older releases
    size: int = 0  # bytes of the body that engines get; 0 from older releases


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request, the same at each attempt."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    body: bytes  # as engines get it, with the conversation before it
    headers: dict[str, str]
    is_stream: bool
    prompt_bytes: int
    blocks: tuple[int, ...]
    at: float  # s since 1970 when it was sent
    digest: bytes  # of the client's body
    shown: bytes  # JSON, the response before it begins
    conversation: bytes  # MessagePack, the messages with those of the input
    inputs: bytes  # JSON, the items of the input

    @property
    def name(self) -> str:
        """The id of its response."""
        return response_id_of(self.request_id)

    @property
    def conversation_id(self) -> str:
        """The conversation that it continues; "": none."""
        shown = msgspec.json.decode(self.shown, type=dict[str, Any])
        return str((shown.get("conversation") or {}).get("id", ""))


def queued_response(generation: GenerationRequest, headers: dict[str, str]) -> bytes:
    """JSON of the response to a request that has not begun. `headers`: as engines get them."""
    named = read_request_name(headers[NAME]) or RequestName("")
    shown = make_response(
        generation.response or ResponseFields(),
        request_id=named.id,
        created=named.created,
        status="queued",
        model=generation.model,
        seed=generation.seed if generation.seed is not None else named.seed or 0,
    )
    return msgspec.json.encode(shown)


class Opened(NamedTuple):
    """A record with its id."""

    request_id: str
    tenant: str
    at: float
    blob: str
    conversation: str
    digest: str  # hexadecimal
    size: int


class Jobs:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(self, store: CoordinationStore, blobs: BlobStore, wall: Callable[[], float]) -> None:
        self._store = store
        self._blobs = blobs
        self._wall = wall

    async def write(self, job: Job) -> str:
        """Write the blob of a job, before `add`; its name. Raises `StarlingError`."""
        blob = f"{FOLDER}/{job.request_id}-{secrets.token_hex(8)}"
        data = await inline_or_not(len(job.body) + len(job.conversation), partial(msgspec.msgpack.encode, job))
        if len(data) > MAX_JOB_BYTES:
            raise ResourceError(f"the request has {len(data)} bytes, over {MAX_JOB_BYTES}; send less", "background")
        try:
            async with asyncio.timeout(PUT_S):
                await self._blobs.put(blob, data)
        except (TimeoutError, asyncio.CancelledError) as error:
            await self.discard(blob)  # `put` may have stored it all the same
            if isinstance(error, TimeoutError):
                raise StorageUnavailable(f"the request was not stored within {PUT_S:g} s", "background") from None
            raise
        return blob

    async def add(self, job: Job, blob: str, check: Callable[[list[Opened]], None] = lambda opened: None) -> bool:
        """Add a job whose blob is there. False: there is one of this id. Raises `StorageUnavailable`.

        `check`: gets the jobs that have not ended, and raises if they leave no room; that is raised.
        """
        record = OpenRecord(
            tenant=job.tenant,
            at=self._wall(),
            blob=blob,
            conversation=job.conversation_id,
            digest=job.digest.hex(),
            size=len(job.body),
        )
        key, value = OPEN + job.request_id, msgspec.json.encode(record)
        for _ in range(TRIES):
            admitted = await self._store.get(ADMITTED)  # first: what is added later changes it
            opened = await self.all()
            if any(one.request_id == job.request_id for one in opened):
                return False
            check(opened)
            conditions = Condition(key, 0), Condition(ADMITTED, admitted.revision if admitted is not None else 0)
            if await self._store.transact(conditions, (Change(key, value), Change(ADMITTED, b"1"))) is not None:
                return True
            await asyncio.sleep(random.uniform(0.0, TRY_PAUSE_S))
        raise StorageUnavailable(
            "the fleet's orchestrators take too many requests in the background at the same time; try again",
            "background",
            retry_after_s=1.0,
        )

    async def discard(self, blob: str) -> None:
        """Remove a blob that no record names. One that stays is removed by `sweep`."""
        try:
            async with asyncio.timeout(PUT_S):
                await self._blobs.delete(blob)
        except (StarlingError, TimeoutError) as error:
            log.warning("a request that was not taken stays stored", extra={"blob": blob, "reason": str(error)})

    async def all(self) -> list[Opened]:
        """The records of jobs that have not ended. Raises `StorageUnavailable`."""
        items, _ = await self._store.scan(OPEN)
        return [opened for item in items if (opened := _opened(item.key, item.value)) is not None]

    async def is_open(self, request_id: str) -> bool:
        """Whether a job has not ended. Raises `StorageUnavailable`."""
        return await self._store.get(OPEN + request_id) is not None

    async def opened(self, request_id: str, tenant: str) -> Opened | None:
        """The record of a job of the tenant that has not ended. Raises `StorageUnavailable`."""
        item = await self._store.get(OPEN + request_id)
        opened = _opened(item.key, item.value) if item is not None else None
        return opened if opened is not None and opened.tenant == tenant else None

    async def find(self, request_id: str, tenant: str) -> Job | None:
        """A job of the tenant that has not ended. Raises `StorageUnavailable`."""
        opened = await self.opened(request_id, tenant)
        if opened is None:
            return None
        try:
            data = await self._blobs.read(opened.blob, MAX_JOB_BYTES)
            return await inline_or_not(len(data), partial(msgspec.msgpack.decode, data, type=Job))
        except NotFound:
            return None
        except DECODE_ERRORS as error:
            raise StorageUnavailable(f"the request {request_id} cannot be read: {error}") from None

    async def end(self, request_id: str) -> None:
        """It has ended. Idempotent. Raises `StorageUnavailable`."""
        item = await self._store.get(OPEN + request_id)
        if item is not None:
            await self._store.swap(item.key, item.revision, None)
            if (opened := _opened(item.key, item.value)) is not None:
                await self._blobs.delete(opened.blob)

    async def sweep(self, timeout_s: float) -> None:
        """Remove blobs whose orchestrator died beside their record, and records that none can end.

        One orchestrator does it now and then. `timeout_s`: for a response.
        """
        opened = await self.all()
        for one in opened:  # its blob is gone, or cannot be read
            if one.at + timeout_s + ABANDONED_S < self._wall():
                await self.end(one.request_id)
        known = {one.blob for one in opened}
        for blob in await self._blobs.scan(FOLDER):
            if blob.key not in known and blob.modified + ABANDONED_S < self._wall():
                await self._blobs.delete(blob.key)


def _opened(key: str, value: bytes) -> Opened | None:
    try:
        record = msgspec.json.decode(value, type=OpenRecord)
    except DECODE_ERRORS:
        return None
    of = record.tenant, record.at, record.blob, record.conversation, record.digest, record.size
    return Opened(key.removeprefix(OPEN), *of)
