"""The answer of /v1/responses on its way through an orchestrator: stored before its last event, or failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api import response_context, sse
from pipeline.api.json_body import to_json
from pipeline.api.response_context import KeptResponse, encode_kept, kept_comment
from pipeline.errors import InternalError, ModelUnavailable, StarlingError, StorageUnavailable
from stages.orchestrator.event_cutter import MAX_EVENT_BYTES, EventCutter
from stages.orchestrator.known_sessions import SessionReader
from stages.orchestrator.responses.keeping import AfterOut, KeepingOut

KEPT = KeptResponse(b"\x90", b"[]")
RESPONSE = {"id": "resp_1", "status": "in_progress", "error": None, "usage": None}


class Client:
    """Checks that it gets whole events."""

    is_begun = False

    def __init__(self) -> None:
        self.data = b""
        self.log: list[str] = []

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_begun = True

    async def write(self, data: bytes) -> None:
        assert data.endswith(b"\n\n")
        self.data += data
        self.log += [one.name for one in parsed(data)]

    def write_now(self, data: bytes) -> bool:
        return False

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        raise AssertionError("not in the form of this API")


class Event(NamedTuple):
    name: str
    data: Any


def parsed(data: bytes) -> list[Event]:
    """The events of a stream."""
    blocks = [block for block in data.split(b"\n\n")[:-1] if not block.startswith(b":")]
    fields = [dict(line.split(b": ", 1) for line in block.split(b"\n")) for block in blocks]
    return [Event(one[b"event"].decode(), json.loads(one[b"data"])) for one in fields]


def event(name: str, number: int, **more: Any) -> bytes:
    data = {"type": name, "sequence_number": number, **more}
    return sse.event(to_json(data), b"req-1:%d" % number, name.encode())


def stream(last: str = "completed", usage: Any = None) -> list[bytes]:
    response = {**RESPONSE, "status": last, "usage": usage or {"output_tokens": 3}}
    return [
        event("response.created", 0, response=RESPONSE),
        event("response.in_progress", 1, response=RESPONSE),
        event("response.output_text.delta", 6, delta="Hello"),
        kept_comment(encode_kept(KEPT)),
        event(f"response.{last}", 7, response=response),
    ]


@pytest.mark.parametrize("last", ["completed", "incomplete"])
@pytest.mark.parametrize("is_joined", [False, True])
async def test_a_response_is_stored_before_its_last_event(last: str, is_joined: bool) -> None:
    client = Client()

    async def keep(body: bytes, kept: KeptResponse) -> None:
        assert kept == KEPT and json.loads(body)["status"] == last
        client.log.append("stored")

    out = KeepingOut(client, keep)
    blocks = stream(last)
    for data in [b"".join(blocks)] if is_joined else blocks:
        await out.write(data)
    assert client.log[-2:] == ["stored", f"response.{last}"] and b"kept" not in client.data
    assert out.usage == {"output_tokens": 3}


async def test_a_response_that_cannot_be_stored_fails() -> None:
    async def keep(body: bytes, kept: KeptResponse) -> None:
        raise StorageUnavailable("the disk is full", "store")

    client = Client()
    await KeepingOut(client, keep).write(b"".join(stream()))
    last = parsed(client.data)[-1]
    assert (last.name, last.data["type"], last.data["sequence_number"]) == ("response.failed", "response.failed", 7)
    shown = last.data["response"]
    assert (shown["status"], shown["error"]["code"], shown["usage"]) == ("failed", "server_error", None)
    assert "the disk is full" in shown["error"]["message"]


async def test_errors_of_the_orchestrator_have_the_form_of_the_api() -> None:
    async def keep(body: bytes, kept: KeptResponse) -> None:
        raise AssertionError

    client = Client()
    out = KeepingOut(client, keep)
    await out.fail(ModelUnavailable("no agent"), [0])
    assert (parsed(client.data)[0].name, parsed(client.data)[0].data["code"]) == ("error", "MODEL_UNAVAILABLE")
    queued = Client()
    out = KeepingOut(queued, keep, queued=to_json({**RESPONSE, "status": "queued"}))
    await out.fail(ModelUnavailable("no agent"), [0])
    events = parsed(queued.data)
    assert [one.name for one in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [one.data["sequence_number"] for one in events] == [0, 1, 2]
    assert events[0].data["response"] == events[1].data["response"] == RESPONSE
    assert events[2].data["response"]["error"]["message"] == "no agent"
    begun = Client()
    out = KeepingOut(begun, keep, queued=to_json({**RESPONSE, "status": "queued"}))
    await out.write(b"".join(stream()[:3]))
    await out.fail(ModelUnavailable("no agent"), [0])
    last = parsed(begun.data)[-1]
    assert (last.name, last.data["sequence_number"]) == ("response.failed", 7)
    assert (last.data["response"]["id"], last.data["response"]["status"]) == ("resp_1", "failed")


async def test_errors_of_other_streams_that_are_read_again_have_their_form() -> None:
    class Other(Client):
        async def write(self, data: bytes) -> None:
            self.data += data

        async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
            self.log.append(error.code)

    async def keep(body: bytes, kept: KeptResponse) -> None:
        raise AssertionError

    other = Other()
    out = KeepingOut(other, keep, is_response=False)
    await out.write(b'id: req-1:1\ndata: {"id":"x","choices":[]}\n\n')
    await out.fail(ModelUnavailable("no agent"), [0])
    assert other.log == ["MODEL_UNAVAILABLE"]
    begun = Client()
    out = KeepingOut(begun, keep, is_response=False)
    await out.write(stream()[2])
    await out.fail(ModelUnavailable("no agent"), [0])
    assert parsed(begun.data)[-1].data["sequence_number"] == 7


async def test_a_response_without_a_record_is_not_stored() -> None:
    async def keep(body: bytes, kept: KeptResponse) -> None:
        raise AssertionError

    client, blocks = Client(), stream()
    await KeepingOut(client, keep).write(b"".join(blocks[:3] + blocks[4:]))
    assert client.data == b"".join(blocks[:3] + blocks[4:])


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), st.integers(-1, 14))
async def test_what_follows_a_sequence_number_is_the_rest_of_the_text(text: str, after: int) -> None:
    client = Client()
    end = 2 + len(text)
    blocks = [
        event("response.created", 0),
        event("response.in_progress", 1),
        event("response.output_item.added", 2),
        event("response.output_text.delta", end, delta=text),
        event("response.completed", end + 1, response={}),
    ]
    await AfterOut(client, after).write(b"".join(blocks))
    events = parsed(client.data)
    assert all(one.data["sequence_number"] > after for one in events)
    spoken = "".join(one.data.get("delta", "") for one in events)
    assert spoken == text[max(0, min(after, end) - 2) :]


@pytest.mark.parametrize("is_created", [False, True])
async def test_a_failure_is_sent_whatever_its_number(is_created: bool) -> None:
    """An orchestrator that has only seen the end of a stream does not know the numbers."""

    async def keep(body: bytes, kept: KeptResponse) -> None:
        raise AssertionError

    client = Client()
    out = KeepingOut(AfterOut(client, 5), keep)
    if is_created:
        await out.write(stream()[0])
    await out.fail(ModelUnavailable("no agent"), [0])
    assert [one.name for one in parsed(client.data)] == ["response.failed" if is_created else "error"]


def test_the_code_before_a_failed_event_says_whether_another_engine_may_go_on() -> None:
    cutter = EventCutter()
    failed = event("response.failed", 3, response={"error": {"code": "server_error", "message": "x"}})
    forwarded = cutter.feed(b"".join(stream()[:2]) + response_context.failed_comment("DRAINING") + failed)
    assert forwarded == b"".join(stream()[:2])
    assert (cutter.error, cutter.error_code, cutter.is_over) == (failed, "DRAINING", False)
    cutter.restart(is_replay=False)
    assert cutter.error_code == ""
    assert cutter.feed(stream()[4]) and cutter.is_over


def test_records_that_are_damaged_are_none() -> None:
    comment = kept_comment(encode_kept(KEPT))[:-2]
    assert response_context.read_kept(comment) == KEPT
    assert response_context.read_kept(comment[:-1]) is None
    assert response_context.read_kept(b": kept ") is None
    assert response_context.decode_kept(b"\x00") is None
    body = b"{}" + encode_kept(KEPT)
    assert response_context.split_kept(body, str(len(body) - 2)) == (b"{}", KEPT)
    assert response_context.split_kept(b"{}", None) == (b"{}", None)
    for header in ("0", "-1", "x", "1", "99999999", "123456789"):
        with pytest.raises(InternalError, match="no readable record"):
            response_context.split_kept(body, header)


def test_a_record_of_the_largest_conversation_fits_into_an_event() -> None:
    comment = kept_comment(b"x" * response_context.MAX_KEPT_BYTES)
    assert len(comment) <= MAX_EVENT_BYTES
    assert response_context.MAX_KEPT_BYTES > 2 * response_context.MAX_BYTES


async def test_the_turn_of_a_conversation_ends_before_any_last_event() -> None:
    """Also if the engine ends the stream with an error before it has a response."""
    lasts = [
        event("error", 0, code="server_error"),
        event("response.failed", 7, response=RESPONSE),
        stream()[-1],
    ]
    for last in lasts:
        client = Client()

        async def keep(body: bytes, kept: KeptResponse) -> None:
            raise AssertionError

        async def ends() -> None:
            client.log.append("ends")  # noqa: B023

        await KeepingOut(client, keep, before_end=ends).write(last)
        assert client.log[0] == "ends" and len(client.log) == 2


def test_a_response_that_has_begun_with_a_comment_is_not_begun_again() -> None:
    """A client for whom nothing comes gets one from its connection, which the others do not see."""
    client = Client()
    out = KeepingOut(AfterOut(SessionReader(client), 5), _unused)
    assert not out.is_begun
    client.begin(200, {})
    assert out.is_begun


async def _unused(body: bytes, kept: KeptResponse) -> None:
    raise AssertionError
