"""Responses that are added to conversations, and what the stores have of them, for tests."""

from __future__ import annotations

import msgspec

from pipeline.api.requests.conversations import ConversationItem
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import response_id_of
from stages.orchestrator.request_ids import RequestIds
from stages.orchestrator.responses.jobs import Job
from stages.orchestrator.responses.service import Responses
from stages.orchestrator.responses.tenant_blobs import ABANDONED_S, SETTLED_S, counted
from stages.orchestrator.responses.use import ALL, USE, Use, folder_of
from tests.orchestrator.mortal import MortalOrchestrator, World


def response(number: int) -> str:
    return f"resp_{number:024x}"


def completed(name: str, conversation: str, *, is_stored: bool = True) -> tuple[bytes, KeptResponse]:
    """A response and what an engine says of it."""
    digits = name[5:]
    message = {
        "id": f"msg_{digits}000",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": f"answer {digits}", "annotations": [], "logprobs": []}],
    }
    shown = {
        "id": name,
        "status": "completed",
        "store": is_stored,
        "conversation": {"id": conversation} if conversation else None,
        "output": [message],
    }
    given = {
        "id": f"msg_{digits}i000",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": f"question {digits}"}],
    }
    return msgspec.json.encode(shown), KeptResponse(b"\x90", msgspec.json.encode([given]))


def ids_of(name: str) -> list[str]:
    return [f"msg_{name[5:]}i000", f"msg_{name[5:]}000"]


def item(name: str, size: int = 10) -> ConversationItem:
    return ConversationItem(name, b'"%s"' % (b"x" * size), {"role": "user", "content": name})


async def put(one: MortalOrchestrator, tenant: str, name: str, conversation: str) -> None:
    await one.shared.keeper.put(tenant, *completed(name, conversation))


async def ids(one: MortalOrchestrator, tenant: str, conversation: str) -> list[str]:
    return [found.id for found in (await one.shared.conversations.get(tenant, conversation)).items]


async def check_counts(world: World, *tenants: str, is_exact: bool = True) -> None:
    """What is counted is what is stored; after a death at least that."""
    total = Use()
    for tenant in tenants:
        listed = await world.blobs.scan(folder_of(tenant))
        record = await world.store.get(USE + folder_of(tenant))
        found = msgspec.json.decode(record.value, type=Use) if record is not None else Use()
        stored = sum(counted(blob.nbytes) for blob in listed), len(listed)
        assert (found.bytes, found.count) == stored if is_exact else (found.bytes >= stored[0])
        assert found.count >= stored[1]
        total = Use(bytes=total.bytes + found.bytes, count=total.count + found.count)
    record = await world.store.get(ALL)
    every = msgspec.json.decode(record.value, type=Use) if record is not None else Use()
    assert (every.bytes, every.count) == (total.bytes, total.count)


async def settle(world: World, one: MortalOrchestrator) -> None:
    """What the elected orchestrator does later, twice."""
    for _ in range(2):
        world.wall.now += ABANDONED_S + SETTLED_S
        await one.shared.place.sweep()


def job(request_id: str, conversation: str) -> Job:
    """A request in the background."""
    shown = msgspec.json.encode({"id": response_id_of(request_id), "conversation": {"id": conversation}})
    return Job(
        request_id=request_id,
        tenant="a",
        key_id="",
        model="m",
        body=b"{}",
        headers={},
        is_stream=False,
        prompt_bytes=1,
        blocks=(),
        at=1_000_000.0,
        digest=b"d",
        shown=shown,
        conversation=b"\x90",
        inputs=b"[]",
    )


def service(world: World) -> tuple[MortalOrchestrator, Responses, RequestIds]:
    """An orchestrator with what clients' requests use of it."""
    one, ids = world.orchestrator(), RequestIds("secret", world.wall)
    return one, Responses(one.shared, ids), ids
