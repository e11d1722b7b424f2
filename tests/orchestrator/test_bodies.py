"""Bodies are checked before a model is loaded: the orchestrator refuses what a gateway refuses, with the same error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.error_response import ErrorResponse, error_response
from pipeline.api.requests import chat, completions, embeddings, generate, messages, rerank, tokenize
from pipeline.errors import StarlingError
from stages.gateway.endpoints.body_readers import Body, read_request_body
from stages.orchestrator.read_body import OTHER_PATHS, TEXT_PATHS, read_body
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, TestAgent
from tests.orchestrator.streams import MINE
from tests.properties import examples

TALK = [{"role": "user", "content": "x"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "x"},
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": TALK, "max_tokens": 5},
    "/v1/generate": {"prompt": "x"},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/v1/tokenize": {"text": "x"},
    "/v1/detokenize": {"tokens": [1]},
    "/v1/session/close": {"session_id": "s"},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
}
TABLES = {
    "/v1/chat/completions": chat.BODY,
    "/v1/completions": completions.BODY,
    "/v1/messages": messages.BODY,
    "/v1/generate": generate.BODY,
    "/v1/messages/count_tokens": messages.COUNT_BODY,
    "/v1/tokenize": tokenize.TOKENIZE_BODY,
    "/v1/detokenize": tokenize.DETOKENIZE_BODY,
    "/v1/embeddings": embeddings.BODY,
    "/v1/rerank": rerank.RERANK_BODY,
    "/v1/score": rerank.SCORE_BODY,
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BAD: list[tuple[str, dict[str, Any] | bytes]] = [
    *((path, {"unheard_of": 1}) for path in VALID),
    *((path, {"model": 7}) for path in VALID),
    *((path, b"[]") for path in VALID),
    *((path, b'{"model":"cold","model":"cold"}') for path in VALID),
    *((path, {name: {"wrong": True}}) for path, body in VALID.items() for name in body),
    *((path, {"temperature": 9}) for path in TEXT_PATHS),
    *((path, {"keep_alive": "soon"}) for path in (*TEXT_PATHS, "/v1/embeddings")),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}),
    ("/v1/chat/completions", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("/v1/chat/completions", {"tool_choice": "required"}),
    ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"reasoning_effort": "some"}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 1}}}),
    ("/v1/completions", {"best_of": 2, "n": 3}),
    ("/v1/completions", {"prompt": [1, "x"]}),
    ("/v1/completions", {"suffix": "s", "echo": True}),
    ("/v1/generate", {"session_id": "s", "n": 2}),
    ("/v1/generate", {"max_tokens": 2, "min_tokens": 3}),
    ("/v1/generate", {"regex": "a", "choice": ["a"]}),
    ("/v1/messages", {"system": 7}),
    ("/v1/responses", {"input": [{"type": "image_generation_call"}]}),
    ("/v1/responses", {"background": True, "store": False}),
    ("/v1/responses", {"conversation": "conv_1", "previous_response_id": "resp_1"}),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 4096}}),
    ("/v1/embeddings", {"dimensions": 0}),
    ("/v1/score", {"text_1": ["x"] * 2, "text_2": ["y"] * 3}),
    ("/v1/tokenize", {"add_special_tokens": "no"}),
]


def test_every_body_that_a_gateway_refuses_is_refused_before_a_load(
    fleet: Fleet, engines: list[Server], cold_agent: TestAgent
) -> None:
    loads = list(cold_agent.loads)
    named = {"X-Request-Id": "one-name"}  # which Anthropic's errors repeat
    for path, bad in BAD:
        body = bad if isinstance(bad, bytes) else {"model": "cold", **VALID[path], **bad}
        expected = engines[0].post(path, body, named)
        found = fleet.post(path, body, {**MINE, **named})
        assert expected.status == 400, (path, bad, expected.body)
        assert (found.status, found.body) == (400, expected.body), (path, bad)
    early = {"Anthropic-Version": "2023-01-01"}
    answers = [
        server.post("/v1/messages", {"model": "cold", **VALID["/v1/messages"]}, {**MINE, **named, **early})
        for server in (engines[0], fleet)
    ]
    assert [one.status for one in answers] == [400, 400] and answers[0].body == answers[1].body
    assert cold_agent.loads == loads


def test_what_generates_no_text_counts_as_tokens() -> None:
    def converted(path: str, **fields: Any) -> int:
        data = json.dumps({"model": "m", **VALID[path], **fields}).encode()
        return read_body(path, data, "application/json", "", 1 << 20).converted

    assert converted("/v1/tokenize", text="x" * 9) == 3
    assert converted("/v1/tokenize", text="\u00e4" * 4) == 2  # of two bytes each
    assert converted("/v1/detokenize", tokens=[1, 2, 3]) == 3
    assert converted("/v1/embeddings", input=["x" * 4, "y" * 5]) == 3
    assert converted("/v1/embeddings", input=[[1, 2], [3]]) == 3
    assert converted("/v1/rerank", query="x" * 4, documents=["y" * 4, "z" * 8]) == 4
    assert converted("/v1/score", text_1="x" * 4, text_2=["y" * 4]) == 2
    assert converted("/v1/messages/count_tokens", messages=[{"role": "user", "content": "x" * 8}]) == 2
    assert converted("/v1/session/close") == 0
    assert all(converted(path) == 0 for path in TEXT_PATHS)  # whose prompts count by themselves


NUMBERS = st.integers(-(2**63), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes, str, str]:
    """Path, body, content type and coding: a valid body with some fields of its endpoint changed or left out."""
    path = draw(st.sampled_from(sorted(TABLES)))
    names = sorted(TABLES[path].fields)
    body = {"model": "m", **VALID[path], **draw(st.dictionaries(st.sampled_from(names), JSON, max_size=3))}
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=1)):
        del body[name]
    data = json.dumps(body).encode()
    coding = draw(st.sampled_from(["", "", "gzip", "br"]))
    kind = draw(st.sampled_from(["application/json"] * 4 + ["text/plain"]))
    return path, gzip.compress(data) if coding else data, kind, coding


def outcome(read: Callable[[], Any]) -> Any:
    """What a reader returns, or its error as clients get it."""
    try:
        return read()
    except StarlingError as refused:
        return error_response(refused)


@settings(max_examples=examples(60))
@given(requests())
def test_any_body_gets_the_error_of_the_gateway(request: tuple[str, bytes, str, str]) -> None:
    path, data, kind, coding = request
    body = Body(data, {**TEXT_PATHS, **OTHER_PATHS}[path], kind, coding, 1 << 20)
    accepted = outcome(lambda: read_request_body(body))
    found = outcome(lambda: read_body(path, data, kind, coding, 1 << 20))
    if isinstance(accepted, ErrorResponse):
        assert found == accepted
    elif not accepted.model:  # a gateway has a first model, a fleet has none
        assert b"model is missing" in found.body
    else:
        assert (found.model, found.is_stream) == (accepted.model, getattr(accepted, "stream", False))
        assert found.session == getattr(accepted, "session_id", None)
