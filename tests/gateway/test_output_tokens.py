"""A stream that one server has begun goes on at another from its output tokens: the same bytes, none computed twice."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.output_tokens import (
    MAX_OUTPUT_BYTES,
    comment,
    decode_output,
    encode_output,
    output_length,
    read_comment,
    version_name,
)
from pipeline.errors import InvalidRequest
from shm.pages import NUMERICS
from stages.tokenizer.service import TokenizerService
from tests.e2e.server import poll_until
from tests.gateway.peers import MODEL, make_tokenizer
from tests.gateway.server import Server

VERSION = version_name("ab" * 32, "f16", NUMERICS)
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "please say Ein Käfig ging, 一只鸟 zu suchen 🐦. <tool>{</tool> The end of it",
    "max_tokens": 60,
    "stream": True,
}
CHAT = {name: value for name, value in BODY.items() if name != "prompt"} | {
    "messages": [{"role": "user", "content": BODY["prompt"]}]
}
NAMES = (f"req-{number:024x}" for number in count(1))
Tokens = list["array[int]"]


@given(
    st.integers(0, 9999),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.lists(st.integers(0, 2**31 - 1), min_size=1),
)
@settings(deadline=None)
def test_comments_are_read_as_they_were_written(choice: int, first: int, cached: int, tokens: list[int]) -> None:
    written = comment(choice, first, cached, tokens).removesuffix(b"\n\n")
    assert read_comment(written) == (choice, first, cached, tokens)


@given(st.binary())
@settings(deadline=None)
def test_other_bytes_are_no_output(data: bytes) -> None:
    read_comment(data)
    try:
        output = decode_output(data)
    except InvalidRequest:
        return
    again = encode_output(output.version, [array("i", one) for one in output.tokens], output.cached)
    assert decode_output(again) == output


@pytest.mark.parametrize("given", ["", "0", "-1", "1e3", "٣", str(MAX_OUTPUT_BYTES + 1), "999999999"])
def test_other_lengths_are_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="X-Starling-Output"):
        output_length(given)


@pytest.fixture(scope="module")
def other(homes: Any) -> Iterator[Server]:
    running = Server(homes(), scheduler={"max_output_tokens": 300})
    running.wait_ready()
    yield running
    assert running.close() == 0


def named(name: str, **headers: str) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "X-Starling-Request": f"{name}; created=1700000000; seed=7",
        "X-Starling-Relay": "1",
        **headers,
    }


def split(raw: bytes) -> tuple[bytes, Tokens]:
    """A stream without its comments, and the tokens that they name."""
    blocks: list[bytes] = []
    tokens: Tokens = []
    for block in raw.split(b"\n\n"):
        found = read_comment(block)
        if found is None:
            blocks.append(block)
        else:
            choice, first, _, ids = found
            tokens += [array("i") for _ in range(choice + 1 - len(tokens))]
            assert first <= len(tokens[choice])
            tokens[choice].extend(ids[len(tokens[choice]) - first :])
    return b"\n\n".join(blocks), tokens


def continued(
    server: Server, path: str, body: dict[str, Any], name: str, tokens: Tokens, version: str = VERSION
) -> Any:
    output = encode_output(version, tokens, [3] * len(tokens))
    headers = named(name, **{"X-Starling-Output": str(len(output))})
    return server.post(path, json.dumps(body).encode() + output, headers)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate", {**BODY, "n": 2}),
        ("/v1/completions", {**BODY, "stop": ["zu such"], "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**BODY, "max_tokens": 24, "prompt": "by chance", "ignore_eos": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
    ],
)
def test_a_stream_goes_on_at_another_server(server: Server, other: Server, path: str, body: dict[str, Any]) -> None:
    name = next(NAMES)
    raw = server.post(path, body, named(name)).body
    undisturbed, tokens = split(raw)
    assert undisturbed.count(b"data: ") > 8
    # At every token, within characters of several bytes, within the stop string and after the last one.
    for at in (1, 6, 7, 8, 19, 20, len(tokens[0]) - 1, len(tokens[0])):
        begun = [tokens[0][:at], *(one[: at // 2] for one in tokens[1:])]
        answer = continued(other, path, body, name, begun)
        assert answer.status == 200, answer.body
        whole, again = split(answer.body)
        assert plain(whole) == plain(undisturbed)
        assert all(one[: len(two)] == two[: len(one)] for one, two in zip(again, tokens))
        sent = {frame.choice: frame.forced for frame in other.peers.generator.submitted if frame.request == name}
        assert sent.items() <= {n: one.tobytes() for n, one in enumerate(begun)}.items()
        assert len(sent) == len(begun) or at > 8
        name = next(NAMES)


def test_a_stream_that_is_longer_than_the_second_server_would_make_it_ends(other: Server, make_server: Any) -> None:
    """Without `max_tokens` the limit is that of the server; the first one had a higher one."""
    body = {"model": MODEL, "prompt": "by chance", "ignore_eos": True, "stream": True}
    (data,) = split(other.post("/v1/generate", body, named(next(NAMES))).body)[1]
    second = make_server(scheduler={"max_output_tokens": 40})
    second.wait_ready()
    assert len(data) > 60
    answer = continued(second, "/v1/generate", body, next(NAMES), [data[:60]])
    assert answer.status == 200 and b'"finish_reason":"length"' in answer.body, answer.body
    assert answer.body.count(b"data: ") > 40 and not split(answer.body)[1], "none is computed here"


def plain(raw: bytes) -> list[bytes]:
    """The data of a stream, of each choice in order, without the request's id."""
    raw = re.sub(rb"[0-9a-f]{24}", b"ID", raw)
    events = [block.partition(b"data: ")[2] for block in raw.split(b"\n\n")]
    return sorted(filter(None, events), key=lambda event: b'"index":1' in event)


def test_outputs_that_do_not_fit_are_refused(server: Server, make_server: Any) -> None:
    def refused(body: dict[str, Any], tokens: Tokens, version: str = VERSION) -> tuple[int, str]:
        answer = continued(server, "/v1/generate", body, next(NAMES), tokens, version)
        return answer.status, answer.error["message"]

    one = array("i", [65, 66])
    assert refused(BODY, [one], "another")[0] == 503
    for tokens, reason in (
        ([one, one], "2 sequences, the request 1"),
        ([array("i", [65] * 61)], "61 tokens, and the request is for 60"),
        ([array("i", [-1])], "outside"),
        ([array("i", [100_000])], "outside"),
        ([array("i", [65, 256, 65])], "after its stop token"),
    ):
        status, message = refused(BODY, tokens)
        assert status == 400 and reason in message, message
    assert refused({**BODY, "session_id": ""}, [one])[0] == 400
    unnamed = server.post("/v1/generate", json.dumps(BODY).encode() + b"1", {"X-Starling-Output": "1"})
    assert unnamed.status == 400
    # A request with logprobs is computed from its beginning.
    with_logprobs = {**BODY, "logprobs": 1, "stream": True}
    answer = continued(server, "/v1/completions", with_logprobs, next(NAMES), [one])
    assert answer.status == 200 and b": tokens" not in answer.body
    # Where there are keys, an ordinary one is not enough.
    keys = [{"key": "sk-one", "tenant": "one"}, {"key": "sk-admin", "tenant": "ops", "admin": True}]
    closed = make_server(auth={"api_keys": keys})
    closed.wait_ready()
    for key, status in (("sk-one", 403), ("sk-admin", 200)):
        answer = closed.post("/v1/generate", BODY, named(next(NAMES), Authorization=f"Bearer {key}"))
        assert answer.status == status


def test_an_output_of_an_older_release_goes_on_only_if_the_model_answers_the_same(homes: Any) -> None:
    def tokenizer() -> TokenizerService:
        return make_tokenizer(revision="-kv1")

    revised = Server(homes(), tokenizer=tokenizer)
    try:
        revised.wait_ready()
        begun, now = [array("i", list(b"Ein"))], version_name("ab" * 32, "f16-kv1", NUMERICS)
        answer = continued(revised, "/v1/generate", BODY, next(NAMES), begun)
        assert answer.status == 503 and now in answer.error["message"]
        assert continued(revised, "/v1/generate", BODY, next(NAMES), begun, now).status == 200
    finally:
        assert revised.close() == 0


def test_a_relayed_request_counts_as_its_tenants(server: Server) -> None:
    name = next(NAMES)
    relay = {"X-Starling-Relay": "1; tenant=alice; priority=3"}
    assert server.post("/v1/generate", BODY, named(name, **relay)).status == 200
    (sent,) = [frame for frame in server.peers.generator.submitted if frame.request == name]
    assert (sent.tenant, sent.priority) == ("alice", 3)
    assert server.get(f"/v1/requests/{name}", relay).status == 200
    assert server.get(f"/v1/requests/{name}").status == 404
    for wrong in ("2", "1; tenant=", "1; tenant=a b", "1; priority=3", "1; tenant=a; priority=99999"):
        refused = server.post("/v1/generate", BODY, named(next(NAMES), **{"X-Starling-Relay": wrong}))
        assert (refused.status, refused.error["param"]) == (400, "X-Starling-Relay")


def test_an_answer_that_no_one_has_read_is_told_once(server: Server) -> None:
    """Its request has a key: it goes on without its client, and only one of those who forward it charges it."""
    peers, body = server.peers, {**BODY, "stream": False}
    peers.do(lambda: setattr(peers, "is_stepping", False))
    try:
        name = next(NAMES)
        headers = named(name, **{"Idempotency-Key": name})
        connection = server.connect()
        connection.request("POST", "/v1/generate", json.dumps(body), {"Content-Type": "application/json", **headers})
        while server.request("HEAD", f"/v1/requests/{name}").status != 200:
            pass
        connection.close()
        peers.do(lambda: peers.generator.step(12))
        late = f"/v1/requests/{name}?unread=true&after_s=50"
        told = server.request("DELETE", late).json
        assert (told["cancelled"], told["has_reader"]) == (False, True), "its client may repeat it"
        peers.do(lambda: setattr(peers, "is_stepping", True))
        while (told := server.request("DELETE", late).json)["has_reader"]:
            pass
        assert (told["cancelled"], told["output_tokens"]) == (False, BODY["max_tokens"])
        assert server.request("DELETE", late).status == 404
        again = server.post("/v1/generate", body, headers)
        assert again.json["usage"]["completion_tokens"] == BODY["max_tokens"]
    finally:
        peers.do(lambda: setattr(peers, "is_stepping", True))
    name = next(NAMES)
    assert server.post("/v1/generate", body, named(name, **{"Idempotency-Key": name})).status == 200
    assert server.request("DELETE", f"/v1/requests/{name}?unread=true").status == 404, "it was delivered"
    assert server.request("HEAD", f"/v1/requests/{name}").status == 200


def test_a_relayed_request_waits_for_another_reader(server: Server) -> None:
    peers = server.peers
    whole = split(server.post("/v1/generate", BODY, named(next(NAMES))).body)[0]
    peers.do(lambda: setattr(peers, "is_stepping", False))
    try:
        name = next(NAMES)
        stream = server.stream("/v1/generate", BODY, {**named(name)})
        peers.do(lambda: peers.generator.step(12))
        received = b""
        while received.count(b"data: ") < 5:
            received += stream.response.read1(1 << 16)
        received = received[: received.rfind(b"\n\n") + 2]
        stream.close()
        last = received.rpartition(b"id: ")[2].partition(b"\n")[0].decode()
        again = server.resume(f"/v1/requests/{name}", named(next(NAMES), **{"Last-Event-ID": last}))
        assert [one.request for one in peers.generator.submitted if one.request == name] == [name]
        # Released, it goes on while it is read, and ends with its last reader.
        released = server.request("DELETE", f"/v1/requests/{name}?unread=true")
        assert (released.json["cancelled"], released.json["has_reader"]) == (False, True)
        peers.do(lambda: setattr(peers, "is_stepping", True))
        rest = again.response.read()
        again.close()
        assert plain(split(received + rest)[0]) == plain(whole)
        assert server.request("DELETE", f"/v1/requests/{name}?unread=true").status == 404
        assert server.request("DELETE", f"/v1/requests/{name}?unread=maybe").status == 404
        peers.do(lambda: setattr(peers, "is_stepping", False))
        name = next(NAMES)
        stream = server.stream("/v1/generate", BODY, named(name))
        assert server.request("DELETE", f"/v1/requests/{name}?unread=maybe").status == 400
        assert server.request("DELETE", f"/v1/requests/{name}?unread=true&after_s=61").error["param"] == "after_s"
        assert server.request("DELETE", f"/v1/requests/{name}?unread=true").json["cancelled"] is False
        stream.close()
        while server.request("HEAD", f"/v1/requests/{name}").status != 404:
            pass
    finally:
        peers.do(lambda: setattr(peers, "is_stepping", True))


def test_a_full_queue_has_places_for_the_tenants_that_are_relayed(make_server: Any) -> None:
    """A server with one key has one tenant, until an orchestrator names others."""
    server = make_server(auth={"api_keys": [{"key": "sk-admin", "tenant": "fleet", "admin": True}]})
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "waiting", 1000))
    poll_until(lambda: server.get("/ready").status == 503)
    relay = {"X-Starling-Relay": "1; tenant=alice", "Authorization": "Bearer sk-admin"}
    assert server.post("/v1/generate", BODY, named(next(NAMES), **relay)).status == 200
    ready = server.get("/ready")
    assert ready.status == 200 and ready.json["models"][MODEL]["overloaded"], ready.body
