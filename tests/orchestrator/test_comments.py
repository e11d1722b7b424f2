"""Comments between the events of a stream: the decoders of other people's clients make no event of one."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable

import anthropic._streaming
import openai._streaming
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api import sse
from pipeline.api.response_context import KeptResponse, encode_kept, kept_comment
from stages.orchestrator.event_cutter import EventCutter
from stages.orchestrator.forward import Out
from stages.orchestrator.responses.keeping import AfterOut, KeepingOut
from stages.orchestrator.route_finder import comment
from stages.orchestrator.text_connection import COMMENT
from starling.client.events import read_events
from tests.orchestrator.received import Received

FIRST, SECOND = b'id: r:1\ndata: {"n":1}\n\n', b'id: r:2\ndata: {"n":2}\n\n'
DATA = ['{"n":1}', '{"n":2}']
DECODERS: dict[str, Callable[[bytes], Iterable[object]]] = {
    "openai": lambda data: openai._streaming.SSEDecoder().iter_bytes(iter([data])),
    "anthropic": lambda data: anthropic._streaming.SSEDecoder().iter_bytes(iter([data])),
    "starling": lambda data: read_events(io.BytesIO(data).readline),
}


def decoded(data: bytes) -> dict[str, list[object]]:
    """The data of the events that each client finds."""
    return {name: [one.data for one in decode(data)] for name, decode in DECODERS.items()}  # type: ignore[attr-defined]


async def _keep(body: bytes, kept: KeptResponse) -> None:
    raise AssertionError("no response ends")


def test_an_empty_line_behind_a_comment_would_be_an_event() -> None:
    """What the form of comments is for."""
    assert decoded(FIRST + b": waiting\n\n" + SECOND)["openai"] == [DATA[0], "", DATA[1]]


@pytest.mark.parametrize("form", ["bare", "kept", "after"])
async def test_what_an_orchestrator_waits_for_is_no_event(form: str) -> None:
    client = Received()
    outs: dict[str, Out] = {"bare": client, "kept": KeepingOut(client, _keep), "after": AfterOut(client, 0)}
    out = outs[form]
    for data in (b"", FIRST):
        if data:
            await out.write(data)
        await comment(out, "waiting for an agent: no agent\nis ready")
        assert client.data.endswith(b": waiting for an agent: no agent is ready\n") and client.is_begun
    await out.write(SECOND)
    assert set(map(tuple, decoded(client.data).values())) == {tuple(DATA)}


@pytest.mark.parametrize("sent", [b": loading m: reading (3 s)\n\n", b":\n\n", b": loading m (3 s)\n", b":\n"])
def test_the_comment_of_an_engine_is_passed_on_as_a_line(sent: bytes) -> None:
    cutter = EventCutter()
    received = cutter.feed(FIRST)
    passed = cutter.feed(sent)
    if sent.endswith(b"\n\n"):  # as gateways send them to an orchestrator: at once
        assert passed == sent[:-1]
    received += passed + cutter.feed(SECOND)
    assert received == FIRST + sent.replace(b"\n\n", b"\n") + SECOND
    assert (cutter.n_events, cutter.last_id) == (2, b"r:2")
    assert set(map(tuple, decoded(received).values())) == {tuple(DATA)}


def test_what_probes_for_a_client_that_has_left_is_no_event() -> None:
    size, _, body = COMMENT.partition(b"\r\n")
    assert int(size, 16) == len(body) - 2 and body[:-2] == sse.COMMENT
    assert set(map(tuple, decoded(FIRST + sse.COMMENT + SECOND).values())) == {tuple(DATA)}


async def test_a_record_behind_another_comment_is_kept() -> None:
    record = KeptResponse(b"\x90", b"[]")
    found: list[KeptResponse] = []

    async def keep(body: bytes, kept: KeptResponse) -> None:
        found.append(kept)

    client, cutter = Received(), EventCutter()
    last = b'id: r:3d\nevent: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'
    await KeepingOut(client, keep).write(cutter.feed(b":\n\n" + kept_comment(encode_kept(record)) + last))
    assert found == [record] and client.data == sse.COMMENT + last


@given(st.lists(st.sampled_from([FIRST, SECOND, b":\n", b": a\n", b"retry: 1\n: in it\ndata: {}\n\n"])))
def test_pieces_are_what_was_joined(pieces: list[bytes]) -> None:
    assert sse.pieces(b"".join(pieces)) == pieces
