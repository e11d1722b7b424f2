"""/v1/responses for an orchestrator, which keeps the conversation and the answer: nothing is stored here."""

from __future__ import annotations

import hashlib
import json
from itertools import count
from typing import Any

import msgspec
import pytest

from pipeline.api import response_context
from pipeline.api.idempotency_key import digest_head
from pipeline.api.output_tokens import RELAY
from pipeline.api.response_context import KeptResponse, decode_kept, read_kept
from tests.gateway.response_bodies import CUT, assembled, parse_events, prompt, said
from tests.gateway.server import Server

PATH = "/v1/responses"
NAMES = (f"req-{number:024x}" for number in count(1 << 40))
BEFORE = [{"role": "user", "content": "please say Ada"}, {"role": "assistant", "content": "Ada"}]


def sent(server: Server, body: dict[str, Any], messages: Any = BEFORE, path: str = PATH, **headers: str) -> Any:
    context = messages if isinstance(messages, bytes) else response_context.encode(messages)
    given = {
        "Content-Type": "application/json",
        RELAY: "1; tenant=mine; priority=0",
        "X-Starling-Request": next(NAMES),
        response_context.HEADER: str(len(context)),
        **headers,
    }
    return server.request("POST", path, json.dumps(body).encode() + context, given)


def whole(answer: Any) -> tuple[dict[str, Any], KeptResponse]:
    n_kept = int(answer.headers[response_context.KEPT_HEADER])
    kept = decode_kept(answer.body[-n_kept:])
    assert kept is not None
    return json.loads(answer.body[:-n_kept]), kept


def test_the_answer_has_what_is_stored_with_it(server: Server) -> None:
    response, kept = whole(sent(server, said("Hello", previous_response_id="resp_elsewhere", instructions="Be brief.")))
    assert (response["status"], response["previous_response_id"]) == ("completed", "resp_elsewhere")
    given = prompt(server)
    assert given.index("Be brief.") < given.index("please say Ada") < given.index("please say Hello")
    messages = msgspec.msgpack.decode(kept.conversation)
    assert messages == [
        *BEFORE,
        {"role": "user", "content": "please say Hello"},
        {"role": "assistant", "content": "Hello"},
    ]
    (item,) = json.loads(kept.inputs)
    assert item["content"] == [{"type": "input_text", "text": "please say Hello"}]
    assert server.get(f"{PATH}/{response['id']}", {RELAY: "1; tenant=mine; priority=0"}).status == 404


def test_a_stream_has_it_before_its_last_event(server: Server) -> None:
    answer = sent(server, {**said(CUT, max_output_tokens=len(CUT)), "stream": True})
    blocks = answer.body.split(b"\n\n")[:-1]
    (at,) = [index for index, block in enumerate(blocks) if block.startswith(response_context.KEPT)]
    assert at == len(blocks) - 2
    kept = read_kept(blocks[at])
    assert kept is not None
    last = msgspec.msgpack.decode(kept.conversation)[-1]
    assert last["tool_calls"][0]["function"]["arguments"] == {}  # the whole members of what was cut off
    response = assembled(parse_events(b"".join(b"%b\n\n" % block for block in blocks if not block.startswith(b":"))))
    assert (response["status"], response["output"][0]["arguments"]) == ("incomplete", '{"city": "Ro')


def test_what_is_not_stored_has_no_record(server: Server) -> None:
    answer = sent(server, said("Hello", store=False), [])
    assert answer.json["status"] == "completed" and response_context.KEPT_HEADER not in answer.headers


@pytest.mark.parametrize("is_stored", [False, True])
def test_the_sender_keeps_the_conversation(server: Server, is_stored: bool) -> None:
    """It is none of this server, which adds nothing to it, and takes further requests for it."""
    body = said("Hello", store=is_stored, conversation="conv_elsewhere")
    response, kept = whole(sent(server, body, **{"Idempotency-Key": f"conversation-{is_stored}"}))
    assert (response["conversation"], response["store"]) == ({"id": "conv_elsewhere"}, is_stored)
    assert prompt(server).index("please say Ada") < prompt(server).index("please say Hello")
    assert len(json.loads(kept.inputs)) == 1
    hashed = digest_head("responses", "") + json.dumps(body).encode()
    assert kept.digest == hashlib.sha256(hashed).digest()
    assert whole(sent(server, said("More", conversation="conv_elsewhere")))[1].digest == b""


def test_the_sender_runs_what_is_in_the_background(server: Server) -> None:
    response, _ = whole(sent(server, said("Hello", background=True)))
    assert (response["status"], response["background"]) == ("completed", True)


@pytest.mark.parametrize("length", ["0", "-1", "x", str(response_context.MAX_BYTES + 1), "999999999"])
def test_wrong_lengths_are_refused(server: Server, length: str) -> None:
    refused = sent(server, said("Hello"), **{response_context.HEADER: length})
    assert (refused.status, refused.error["param"]) == (400, response_context.HEADER)


def test_wrong_conversations_are_refused(server: Server) -> None:
    for data in (b"\xc1", b"\x80", b"\x91\x01", b"\x90\x90"):
        refused = sent(server, said("Hello"), data)
        assert (refused.status, refused.error["param"]) == (400, response_context.HEADER), data
    refused = sent(server, {"model": said("")["model"], "prompt": "x"}, path="/v1/completions")
    assert (refused.status, refused.error["param"]) == (400, response_context.HEADER)
    lost = [{"role": "tool", "tool_call_id": "call_x", "content": "sunny"}]
    refused = sent(server, said("Hello"), lost)
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id.call_id")


def test_an_ordinary_key_is_not_enough(make_server: Any) -> None:
    keys = [{"key": "sk-one", "tenant": "one"}, {"key": "sk-admin", "tenant": "ops", "admin": True}]
    closed = make_server(auth={"api_keys": keys})
    closed.wait_ready()
    context = response_context.encode(BEFORE)
    body = json.dumps(said("Hello")).encode() + context
    for key, status in (("sk-one", 403), ("sk-admin", 200)):
        headers = {"Authorization": f"Bearer {key}", response_context.HEADER: str(len(context))}
        answer = closed.request("POST", PATH, body, {"Content-Type": "application/json", **headers})
        assert answer.status == status
    headers = {"Authorization": "Bearer sk-one", response_context.HEADER: str(len(context))}
    given = json.dumps({"model": said("")["model"], "prompt": "x"}).encode() + context
    answer = closed.request("POST", "/v1/tokenize", given, {"Content-Type": "application/json", **headers})
    assert (answer.status, answer.error["param"]) == (400, None), "other endpoints read no conversation"
