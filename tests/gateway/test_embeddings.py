"""/v1/embeddings: inputs, formats, bounds, errors, the official client, and a scheduler that dies meanwhile."""

from __future__ import annotations

import base64
import math
import re
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.api.requests.embeddings import MAX_INPUTS, read
from pipeline.errors import InvalidRequest
from pipeline.protocol import messages as m
from stages.gateway.endpoints.embedding_response import unit_vector, with_end
from stages.gateway.requests.embedder import WINDOW
from tests.gateway.peers import CONTEXT, MODEL, VOCAB_SIZE, WIDTH, hidden
from tests.gateway.server import LONG_MINUTE, Peers, Server

PATH = "/v1/embeddings"


def expected(given: str | list[int], dimensions: int = WIDTH, pooling: str = "last") -> list[float]:
    ids = list(given.encode()) if isinstance(given, str) else given
    vector = hidden(array("i", ids).tobytes(), pooling)[:dimensions].astype(np.float64)
    unit: list[float] = (vector / math.sqrt(math.fsum(vector * vector))).astype(np.float32).tolist()
    return unit


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def paused(server: Server) -> Iterator[Server]:
    """The scheduler takes submissions and computes nothing."""
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    server.peers.do(lambda: server.peers.generator.submitted.clear())
    yield server
    server.peers.do(lambda: setattr(server.peers, "is_stepping", True))


@pytest.mark.parametrize(
    "given",
    ["one text", ["one text"], ["a", "Käfig 🐦", "a"], [5, 6, 7], [[5, 6, 7], [8]], [f"text {i}" for i in range(70)]],
    ids=["text", "list", "equal texts", "ids", "lists of ids", "many"],
)
def test_the_official_client_gets_unit_vectors_in_order(client: openai.OpenAI, given: Any) -> None:
    each = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    for more in ({}, {"encoding_format": "float"}):  # without a format the client asks for base64 and decodes it
        answer = client.embeddings.create(model=MODEL, input=given, **more)
        assert [item.embedding for item in answer.data] == [expected(one) for one in each]
        assert [item.index for item in answer.data] == list(range(len(each)))
        n = sum(len(one.encode() if isinstance(one, str) else one) for one in each)
        assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == (MODEL, n, n)


def test_dimensions_are_cut_before_the_length_is_made_one(client: openai.OpenAI) -> None:
    for n in (1, 5, WIDTH):
        (item,) = client.embeddings.create(model=MODEL, input="some text", dimensions=n).data
        assert item.embedding == expected("some text", n)
    with pytest.raises(openai.BadRequestError, match=f"dimensions is {WIDTH + 1}.*have {WIDTH}") as failed:
        client.embeddings.create(model=MODEL, input="some text", dimensions=WIDTH + 1)
    assert failed.value.param == "dimensions"


def test_base64_is_little_endian_f32(server: Server) -> None:
    answer = server.post(PATH, {"input": "x", "encoding_format": "base64"})
    raw = base64.b64decode(answer.json["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == expected("x")


def test_equal_inputs_are_computed_once(server: Server) -> None:
    server.peers.do(lambda: server.peers.generator.submitted.clear())
    server.post(PATH, {"input": ["same", "other", "same"]})
    frames = list(server.peers.generator.submitted)
    assert sorted(frame.prompt[::4] for frame in frames) == [b"other", b"same"]
    assert {(frame.pooling, frame.max_tokens, frame.forced) for frame in frames} == {("last", 1, b"")}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "0 inputs"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[]]}, "input[0]", "empty"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": ["a", [1]]}, "input[1]", "same kind"),
        ({"input": [True]}, "input[0]", "same kind"),
        ({"input": [1, -1]}, "input[1]", "token id"),
        ({"input": [1, VOCAB_SIZE]}, "input", f"0 to {VOCAB_SIZE - 1}"),
        ({"input": [[1], [2, VOCAB_SIZE]]}, "input", r"input\[1\]\[1\]"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", str(MAX_INPUTS)),
        ({"input": "a", "encoding_format": "f16"}, "encoding_format", "base64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "whole number"),
        ({"input": "a", "stream": True}, "stream", "unknown parameter"),
        ({"input": "a" * (CONTEXT + 1)}, "input", f"{CONTEXT + 1} tokens; at most {CONTEXT}"),
        ({"input": [65] * (CONTEXT + 1)}, "input", f"{CONTEXT + 1} tokens; at most {CONTEXT}"),
        ({"input": "a", "model": "absent"}, "model", "absent"),
    ],
)
def test_errors_name_the_field(server: Server, body: dict[str, Any], param: str, message: str) -> None:
    answer = server.post(PATH, body)
    assert answer.status == (404 if param == "model" else 400)
    assert answer.error["param"] == param
    assert re.search(message, answer.error["message"]), answer.error


def test_the_whole_context_can_be_embedded(server: Server) -> None:
    answer = server.post(PATH, {"input": ["a" * CONTEXT, "b"]})
    assert answer.json["data"][0]["embedding"] == expected("a" * CONTEXT)


def test_a_large_body_is_parsed_in_another_process(server: Server) -> None:
    inputs = [[1 + i % 200, 2, 3 + i // 200] for i in range(1500)]
    answer = server.post(PATH, {"input": inputs})
    assert [item["embedding"] for item in answer.json["data"]] == [expected(one) for one in inputs]


def wait(peers: Peers, condition: Callable[[], bool]) -> None:
    """Until the scripted peers are in a state."""
    deadline = time.monotonic() + 60
    while not peers.do(condition):
        assert time.monotonic() < deadline


def post_in_thread(server: Server, body: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.post(PATH, body)))
    thread.start()
    return thread, answers


def test_a_scheduler_that_dies_loses_nothing(paused: Server) -> None:
    peers = paused.peers
    inputs = [f"input {i}" for i in range(40)]
    thread, answers = post_in_thread(paused, {"input": inputs})
    wait(peers, lambda: len(peers.generator.pooling) == WINDOW)
    peers.do(lambda: peers.generator.step())  # some vectors arrive, the others are lost
    wait(peers, lambda: len(peers.generator.submitted) > WINDOW)
    peers.do(peers.kill_scheduler)
    peers.do(peers.start_scheduler)
    wait(peers, lambda: len(peers.generator.pooling) == WINDOW)
    peers.do(lambda: setattr(peers, "is_stepping", True))
    thread.join(60)
    assert [item["embedding"] for item in answers[0].json["data"]] == [expected(one) for one in inputs]
    assert peers.generator.most_pooling == WINDOW


def test_a_client_that_leaves_is_computed_no_further(paused: Server) -> None:
    peers = paused.peers
    connection = paused.connect()
    body = b'{"input": [' + b",".join(b'"text %d"' % i for i in range(30)) + b"]}"
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    wait(peers, lambda: len(peers.generator.pooling) == WINDOW)
    connection.close()
    wait(peers, lambda: not peers.generator.pooling)
    assert len(peers.generator.submitted) == WINDOW


@pytest.mark.parametrize(("refused", "status"), [(0, 429), (5, 200)])
def test_a_full_queue_refuses_a_new_request_and_delays_one_that_has_begun(
    server: Server, refused: int, status: int
) -> None:
    peers = server.peers
    left = [1]

    def refuse(frame: m.Submit) -> m.Rejected | None:
        if frame.sequence.endswith(f"/{refused}") and left[0]:
            left[0] -= 1
            return m.Rejected(frame.sequence, "OVERLOADED", "the queue is full", "", 0.1)
        return None

    peers.do(lambda: setattr(peers.generator, "refuse", refuse))
    try:
        answer = server.post(PATH, {"input": [f"input {i}" for i in range(9)]})
    finally:
        peers.do(lambda: setattr(peers.generator, "refuse", lambda frame: None))
    assert answer.status == status
    assert left == [0]
    if status == 429:
        assert answer.error["code"] == "OVERLOADED"
        assert int(answer.headers["Retry-After"]) >= 1


def test_a_failed_input_ends_the_request_and_the_others(paused: Server) -> None:
    peers = paused.peers
    thread, answers = post_in_thread(paused, {"input": [f"input {i}" for i in range(12)]})
    wait(peers, lambda: len(peers.generator.pooling) == 12)
    bad = list(peers.generator.pooling)[7]
    end = m.SequenceTokens(bad, 0, (), finish="error", error="INFERENCE", message="not finite")
    peers.do(lambda: peers.generator.outbox.append(m.Tokens(MODEL, 1, [end])))
    peers.do(lambda: peers.generator.pooling.pop(bad))
    thread.join(60)
    assert (answers[0].status, answers[0].error["code"]) == (500, "INFERENCE")
    wait(peers, lambda: not peers.generator.pooling)


def test_tokens_are_charged_and_the_model_can_be_without_embeddings(make_server: Callable[..., Server]) -> None:
    server = make_server(
        rate_limits={"tokens_per_minute": 52},
        models=[{"name": MODEL, "path": "x", "pooling": "mean"}],
        preamble=LONG_MINUTE,
    )
    server.wait_ready()
    answer = server.post(PATH, {"input": ["a" * 30, "b" * 20]})
    assert answer.json["data"][1]["embedding"] == expected("b" * 20, pooling="mean")
    answer = server.post(PATH, {"input": ["a" * 30, "b" * 20]})
    assert (answer.status, answer.error["code"]) == (429, "RATE_LIMITED")
    server = make_server(models=[{"name": MODEL, "path": "x", "pooling": "none"}])
    server.wait_ready()
    answer = server.post(PATH, {"input": "a"})
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "no embeddings" in answer.error["message"]


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e4, 1e4, width=32)), st.integers(1, 40))
def test_unit_vectors(values: np.ndarray, dimensions: int) -> None:
    unit = unit_vector(values.astype("<f4").tobytes(), dimensions)
    assert unit.dtype == np.float32
    some = values[:dimensions].astype(np.float64)
    if not some.any():
        assert not unit.any()
        return
    assert abs(np.linalg.norm(unit.astype(np.float64)) - 1) < 1e-6
    assert np.allclose(unit, some / np.linalg.norm(some), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "end", "expected_tokens"),
    [((1, 2), -1, (1, 2)), ((1, 2), 9, (1, 2, 9)), ((1, 9), 9, (1, 9)), ((), 9, (9,)), ((), -1, ())],
)
def test_a_text_ends_once(tokens: tuple[int, ...], end: int, expected_tokens: tuple[int, ...]) -> None:
    assert with_end(tokens, end) == expected_tokens


def test_token_ids_are_bounded_in_all() -> None:
    ids = [1] * 600_000
    with pytest.raises(InvalidRequest, match="1200000 token ids; at most 1000000"):
        read({"input": [ids, ids]})
