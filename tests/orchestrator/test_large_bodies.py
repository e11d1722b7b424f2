"""Large bodies are hashed on threads: the event loop, which passes all streams on, does not stand still for them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.api.idempotency_key import digest_head
from pipeline.api.keys import Caller
from pipeline.config.load import resolve
from stages.orchestrator.forward import Forward
from stages.orchestrator.stage import OrchestratorStage
from stages.orchestrator.unread_answers import Charge
from tests.orchestrator.conversations import job
from tests.orchestrator.mortal import World

LARGE = 2 << 20
JSON = {"Content-Type": "application/json"}


def digest_of(body: bytes) -> bytes:
    return hashlib.sha256(digest_head("completions", "") + body).digest()


class Recorded:
    """`hashlib.sha256`, with the thread and the size of each call."""

    sha256 = staticmethod(hashlib.sha256)
    calls: list[tuple[int, int]] = []

    def __init__(self, data: bytes = b"", **more: Any) -> None:
        self._hash = Recorded.sha256(**more)
        self.update(data)

    def update(self, data: bytes) -> None:
        Recorded.calls.append((threading.get_ident(), len(data)))
        self._hash.update(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hash, name)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Threads and sizes of what is hashed."""
    Recorded.calls = []
    monkeypatch.setattr(hashlib, "sha256", Recorded)
    return Recorded.calls


def check(hashed: list[tuple[int, int]]) -> None:
    """Once, and not on the thread of the event loop."""
    (thread,) = [thread for thread, nbytes in hashed if nbytes >= LARGE]
    assert thread != threading.get_ident()


@contextlib.asynccontextmanager
async def staged(home: Path) -> AsyncIterator[OrchestratorStage]:
    """An orchestrator that does not run."""
    stage = OrchestratorStage(resolve({}, {"STARLING_HOME": str(home)}))
    try:
        yield stage
    finally:
        await stage.client.close()
        await stage._store.close()
        await stage._blobs.close()
        await stage.responses.close_store()


async def test_the_body_of_a_keyed_request(tmp_path: Path, hashed: list[tuple[int, int]]) -> None:
    async with staged(tmp_path) as stage:
        body = json.dumps({"model": "any", "prompt": "x" * LARGE}).encode()
        ticket = await stage.front.ticket(Caller("mine"), "/v1/completions", body, JSON, "key", "")
        check(hashed)
        assert ticket.forward.digest == digest_of(body)
        hashed.clear()
        small = json.dumps({"model": "any", "prompt": "x"}).encode()
        ticket = await stage.front.ticket(Caller("mine"), "/v1/completions", small, JSON, "other", "")
        assert {thread for thread, _ in hashed} == {threading.get_ident()}  # a thread would take longer
        assert ticket.forward.digest == digest_of(small)


async def test_what_is_charged_when_a_client_has_left_does_not_keep_its_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charges: list[Any] = []

    async def whole(forward: Forward, charge: Charge) -> None:
        assert forward.body
        charges.append(charge)
        raise ConnectionError

    async with staged(tmp_path) as stage:
        monkeypatch.setattr(stage.relay, "whole", whole)
        body = json.dumps({"model": "any", "prompt": "x"}).encode()
        ticket = await stage.front.ticket(Caller("mine"), "/v1/completions", body, JSON, "key", "")
        with pytest.raises(ConnectionError):
            await stage.front.whole(ticket)
    ((charged,),) = [charge.args for charge in charges]
    assert (charged.forward.id, charged.forward.body) == (ticket.forward.id, b"")


async def test_a_request_in_the_background(hashed: list[tuple[int, int]]) -> None:
    jobs = World().orchestrator().shared.jobs
    large = msgspec.structs.replace(job("req-1", ""), body=bytes(LARGE))
    blob = await jobs.write(large)
    assert await jobs.add(large, blob)
    assert not [nbytes for _, nbytes in hashed if nbytes >= LARGE]  # the blob's name is random
    assert await jobs.find("req-1", "a") == large
