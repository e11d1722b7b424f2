"""Invalid HTTP requests over real sockets: the status, the field and the text of each error."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pipeline.api.unsupported_paths import UNSUPPORTED_PATHS
from stages.tokenizer.chunked_encode import RunTooLong
from tests.gateway.peers import MODEL, ByteVocabulary
from tests.gateway.raw_http import exchange, split_responses
from tests.gateway.server import Server

CHAT: dict[str, Any] = {"model": MODEL, "seed": 7, "max_tokens": 30, "messages": [{"role": "user", "content": "Hi"}]}

BAD_BODIES = [
    (b"", "the body is empty"),
    (b"{", "not valid JSON"),
    (b'{"prompt": "x",}', "line 1, column"),
    (b"[1]", "an array; send a JSON object"),
    (b"\xff\xfe", "not valid UTF-8"),
    (b'{"prompt": "\xc3"}', "not valid UTF-8: invalid continuation byte at byte 12"),
    (b'{"prompt": "x", "temperature": NaN}', "NaN, which is not a number in JSON"),
    (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity"),
    (b'{"prompt": "x", "temperature": 1e999}', "too large"),
    (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", "a number of 5001 digits"),
    (b'{"prompt": "x", "prompt": "y"}', "'prompt' twice"),
    (b'{"prompt": "\\ud800"}', "prompt contains a lone surrogate"),
    (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": "x"} trailing', "Extra data"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES)
def test_bodies_that_are_not_a_json_object(server: Server, body: bytes, message: str) -> None:
    answer = server.post("/v1/generate", body)
    assert answer.status == 400
    assert message in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["code"] == "INVALID_REQUEST"


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing"),
    ({"prompt": 5}, "prompt", "an array of token ids, or an array of such arrays"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [1, -1]}, "prompt[1]", "is -1"),
    ({"prompt": [1, 258]}, "prompt", "vocabulary has the ids from 0 to 257"),
    ({"prompt": [[1, 2, 3], [258]]}, "prompt", "prompt[1][0] is 258"),
    ({"prompt": [1, True]}, "prompt[1]", "is true"),
    ({"prompt": ""}, "prompt", "at least one"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "from 0 to"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "is 1.5"),
    ({"prompt": "x", "max_tokens": "10"}, "max_tokens", 'is "10"'),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", "from 0 to"),
    ({"prompt": "x", "max_tokens": 301}, "max_tokens", "at most 300"),
    ({"prompt": "x", "temperature": -0.1}, "temperature", "from 0 to 2"),
    ({"prompt": "x", "temperature": True}, "temperature", "is true"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "repetition_penalty": 1e-40}, "repetition_penalty", "from 0.01 to 10"),
    ({"prompt": "x", "top_k": -5}, "top_k", "is -5"),
    ({"prompt": "x", "n": 17}, "n", "from 1 to 16"),
    ({"prompt": "x", "seed": 2**64}, "seed", "from -9223372036854775808"),
    ({"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
    ({"prompt": "x", "stop": ""}, "stop", "1 to 256"),
    ({"prompt": "x", "stop": ["a", 5]}, "stop[1]", "is 5"),
    ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100"),
    ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias", "is 999"),
    ({"prompt": "x", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "larger"),
    ({"prompt": "x", "order": ["top_k"]}, "order", "mask"),
    ({"prompt": "x", "order": ["mask", "spin"]}, "order[1]", "one of"),
    ({"prompt": "x", "min_p": 1.5}, "min_p", "from 0 to 1"),
    ({"prompt": "x", "typical_p": 0}, "typical_p", "greater than 0"),
    ({"prompt": "x", "top_n_sigma": -2}, "top_n_sigma", "from -1 to 1000"),
    ({"prompt": "x", "dry_multiplier": -1}, "dry_multiplier", "switches DRY off"),
    ({"prompt": "x", "dry_base": 0.5}, "dry_base", "from 1 to 100"),
    ({"prompt": "x", "dry_penalty_last_n": -2}, "dry_penalty_last_n", "all tokens"),
    ({"prompt": "x", "dry_sequence_breakers": "a"}, "dry_sequence_breakers", "array of up to 16"),
    ({"prompt": "x", "dry_multiplier": 1, "dry_sequence_breakers": ["a", "bc"]}, "dry_sequence_breakers", "'bc'"),
    ({"prompt": "x", "xtc_probability": 2}, "xtc_probability", "from 0 to 1"),
    ({"prompt": ["x", "y"], "session_id": ""}, "prompt", "send one"),
    ({"prompt": "x", "temprature": 1}, "temprature", "did you mean temperature?"),
    ({"prompt": "x", "zzz": 1}, "zzz", "unknown parameter zzz"),
    ({"prompt": "x", "session_id": 5}, "session_id", "a string"),
    ({"prompt": "x", "model": "byts"}, "model", "did you mean 'bytes'?"),
    ({"prompt": "x" * 5000}, "prompt", "has 5000 tokens; at most 4095"),
    ({"prompt": "x" * 4000, "max_tokens": 200}, "max_tokens", "at most 96"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_FIELDS)
def test_fields_out_of_bounds(server: Server, body: dict[str, Any], param: str, message: str) -> None:
    answer = server.post("/v1/generate", body)
    assert answer.status in (400, 404)
    assert message in answer.error["message"]
    assert answer.error["param"] == param


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": ["hi"]}, "messages[0]", "an object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "one of system"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role", 'older form of "tool"'),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name", "not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "text only",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"response_format": {"type": "json"}}, "response_format.type", '"json_schema"'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "one schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema",
        "JSON Schema",
    ),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "lone surrogate"),
    ({"guided_json": '{"not":' * 101 + "{}" + "}" * 101}, "guided_json", "nested too deeply; at most 100"),
    ({"guided_json": {"format": "x" * 70_000}}, "guided_json", "65536"),  # as sent: it would be dropped
    ({"choice": []}, "choice", "array of texts"),
    ({"choice": ["a", 1]}, "choice[1]", "a string"),
    ({"grammar": {"syntax": "ebnf", "definition": "x"}}, "grammar.syntax", "lark"),
    ({"regex": "a" * 70_000}, "regex", "65536"),
    ({"regex": "a", "choice": ["b"]}, "choice", "send one of them"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object", "send one"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "says where the output ends"),
    ({"max_completion_tokens": 5}, "max_tokens", "mean the same"),
    ({"mirostat": 2}, "mirostat", "use min_p"),
    ({"mirostat_tau": 4.0}, "mirostat_tau", "belongs to mirostat"),
    ({"metadata": {"a": 1}}, "metadata.a", "a string"),
    ({"service_tier": "quick"}, "service_tier", '"auto" or'),
    ({"prediction": {"type": "content"}}, "prediction.content", "missing"),
    ({"top_logprobs": 2}, "top_logprobs", "set logprobs"),
    ({"logprobs": 2}, "logprobs", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
    ({"store": True}, "store", "nothing is stored"),
    ({"best_of": 2}, "best_of", "unknown parameter"),
]


@pytest.mark.parametrize(("change", "param", "message"), BAD_CHATS)
def test_rejected_chats(server: Server, change: dict[str, Any], param: str, message: str) -> None:
    answer = server.post("/v1/chat/completions", {**CHAT, **change})
    assert answer.status == 400
    assert message in answer.error["message"]
    assert answer.error["param"] == param


def test_neutral_values_of_unsupported_fields_are_accepted(server: Server) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "store": False,
        "modalities": ["text"],
        "metadata": None,
        "response_format": {"type": "text"},
        "user": "someone",
        "service_tier": "auto",
        "logit_bias": None,
    }
    assert server.post("/v1/chat/completions", {**CHAT, **neutral}).status == 200


def test_rejected_completions(server: Server) -> None:
    for change, param in (
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "x", "prompt": [1, 2]}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": ["a", [1]]}, "prompt[1]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 16}, "n"),
        ({"prompt": ["a"] * 20, "best_of": 16}, "best_of"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
    ):
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": "ab", **change})
        assert (answer.status, answer.error["param"]) == (400, param)


def test_a_long_text_is_tokenized_in_full_and_one_over_the_limit_is_rejected(server: Server) -> None:
    text = "日1" * 30_000
    answer = server.post("/v1/tokenize", {"text": text}).json
    assert (answer["model"], answer["count"]) == (MODEL, 120_000)
    assert answer["tokens"] == list(text.encode())
    assert answer["offsets"] == [[i, i + 1] for i in range(120_000)]
    assert server.post("/v1/detokenize", {"tokens": answer["tokens"]}).json["text"] == text
    assert server.post("/v1/tokenize", {"text": ""}).json == {"model": MODEL, "tokens": [], "offsets": [], "count": 0}
    refused = server.post("/v1/tokenize", {"text": "x" * 1_000_001})
    assert (refused.status, refused.error["param"]) == (400, "text")
    assert "text has at least 1000001 tokens; at most 1000000 are allowed per request" in refused.error["message"]


def test_a_body_of_ten_megabytes(server: Server) -> None:
    answer = server.post("/v1/generate", b'{"prompt": "' + b"x" * (10 << 20) + b'"}')
    assert answer.status == 413
    assert "8 MiB (8388608 bytes, server.max_body_mb)" in answer.error["message"]


def test_a_prompt_of_two_hundred_thousand_tokens(server: Server) -> None:
    for prompt in ([65] * 200_000, "x" * 200_000):
        answer = server.post("/v1/generate", {"prompt": prompt})
        assert answer.status == 400
        assert "200000 tokens; at most 4095" in answer.error["message"]
        assert ("has at least" in answer.error["message"]) == isinstance(prompt, str)
        assert answer.error["code"] == "CONTEXT_LENGTH_EXCEEDED"


def test_paths_methods_and_content_types(server: Server) -> None:
    nothing = server.get("/v1/nothing")
    assert (nothing.status, nothing.error["code"]) == (404, "NOT_FOUND")
    for path in ("/v1/fine_tuning/jobs", "/v1/fine-tuning/jobs/x/cancel"):
        for answer in (server.get(path), server.post(path, {"model": "m"})):
            assert (answer.status, answer.error["code"]) == (501, "NOT_IMPLEMENTED")
            assert "does not train" in answer.error["message"]
    for name in (*UNSUPPORTED_PATHS, "audio/speech", "threads/t1/runs", "files/f1/content"):
        answer = server.post(f"/v1/{name}", {"model": "m"})
        error = answer.json["error"]  # of Anthropic's form for its path
        assert answer.status == 501, name
        assert f"/v1/{name.split('/')[0]}" in error["message"]
    assert server.get("/v1/imagesque").status == 404
    readme = (Path(__file__).parents[2] / "docs" / "api" / "README.md").read_text()
    assert [name for name in UNSUPPORTED_PATHS if f"`/v1/{name}`" not in readme] == []
    wrong = server.get("/v1/generate")
    assert (wrong.status, wrong.error["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert "use POST" in wrong.error["message"] and wrong.headers["Allow"] == "POST"
    assert server.post("/health", {}).headers["Allow"] == "GET, HEAD"
    form = server.post("/v1/generate", b"prompt=x", {"Content-Type": "application/x-www-form-urlencoded"})
    assert form.status == 400
    assert "Content-Type: application/json" in form.error["message"]


def _chat(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}], "max_tokens": 1}


_TEXT_PART = {"type": "input_text", "text": "x"}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]}
NOT_TEXT = [
    *(
        ("/v1/chat/completions", _chat({"type": kind, kind: {}}), "messages[0].content[1].type", kind)
        for kind in ("image_url", "input_audio", "file", "video_url", "refusal")
    ),
    (
        "/v1/chat/completions",
        {"modalities": ["text", "audio"], **_chat({"type": "text", "text": "x"})},
        "modalities",
        "",
    ),
    ("/v1/chat/completions", {"audio": {"voice": "a"}, **_chat({"type": "text", "text": "x"})}, "audio", ""),
    ("/v1/chat/completions", {"tools": [{"type": "custom"}], **_chat(_TEXT_PART)}, "tools[0].type", "custom"),
    *(
        ("/v1/responses", {"input": [{"role": "user", "content": [_TEXT_PART, {"type": kind}]}]}, place, kind)
        for place, kind in (("input[0].content[1].type", kind) for kind in ("input_image", "input_audio", "input_file"))
    ),
    *(
        ("/v1/responses", {"input": [{"type": kind}]}, "input[0].type", kind)
        for kind in ("item_reference", "web_search_call", "computer_call", "image_generation_call", "mcp_call")
    ),
    *(
        ("/v1/responses", {"input": "x", "tools": [{"type": kind}]}, "tools[0].type", kind)
        for kind in ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "custom")
    ),
    *(
        ("/v1/messages", _chat({"type": kind, "source": {}}), "messages[0].content[1].type", kind)
        for kind in ("image", "document", "search_result", "server_tool_use", "container_upload")
    ),
    ("/v1/messages", _chat(_RESULT), "messages[0].content[1].content[0].type", "image"),
    ("/v1/messages/count_tokens", _chat({"type": "image"}), "messages[0].content[1].type", "image"),
]


@pytest.mark.parametrize(("path", "body", "param", "kind"), NOT_TEXT)
def test_what_is_not_text_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any], param: str, kind: str
) -> None:
    if path.endswith("count_tokens"):
        body = {name: value for name, value in body.items() if name != "max_tokens"}
    answer = server.post(path, {"model": MODEL, **body})
    error = answer.json["error"]
    assert answer.status == 400
    assert param in error["message"]  # Anthropic's errors have no param
    assert error.get("param", param) == param
    assert kind in error["message"]


UNBROKEN = [
    ("/v1/tokenize", {"text": "unbroken"}, "text", "text"),
    ("/v1/generate", {"prompt": "unbroken"}, "prompt", "prompt"),
    ("/v1/generate", {"prompt": ["x", "unbroken"]}, "prompt", "prompt[1]"),
    ("/v1/embeddings", {"input": "unbroken"}, "input", "input"),
    ("/v1/rerank", {"query": "x", "documents": ["x", "unbroken"]}, "documents", "documents[1]"),
    ("/v1/responses", {"input": "unbroken"}, "input", "input"),
]


@pytest.mark.parametrize(("path", "body", "param", "name"), UNBROKEN)
def test_the_tokenizer_s_refusal_names_the_field_of_the_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str, name: str
) -> None:
    encode_steps = ByteVocabulary.encode_steps

    def refuse(self: ByteVocabulary, text: str, *rest: Any, **more: Any) -> Generator[None, None, Any]:
        if "unbroken" in text:
            raise RunTooLong("524288 characters without a border between words")
        return (yield from encode_steps(self, text, *rest, **more))

    monkeypatch.setattr(ByteVocabulary, "encode_steps", refuse)
    answer = server.post(path, {"model": MODEL, **body})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "INVALID_REQUEST", param)
    assert answer.error["message"].startswith(f"{name} has 524288 characters")
    assert "Retry-After" not in answer.headers  # the same text would be refused again


def test_a_valid_request_id_is_returned(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert server.post("/v1/generate", body, {"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    odd = server.post("/v1/generate", body, {"X-Request-Id": "a b"}).headers["X-Request-Id"]
    assert odd.startswith("req-")


def test_every_answer_has_a_request_id(server: Server) -> None:
    answers = [server.post("/v1/embeddings", {"input": "x"}), server.post("/v1/tokenize", {"text": "x"})]
    answers += [server.get(path) for path in ("/v1/models", "/v1/nothing", "/health")]
    names = [str(answer.headers["X-Request-Id"]) for answer in answers]
    assert [name[:4] for name in names] == ["emb-", "req-", "req-", "req-", "req-"]
    assert len(set(names)) == len(names)
    assert server.get("/v1/models", {"X-Request-Id": "mine-2"}).headers["X-Request-Id"] == "mine-2"


@pytest.mark.parametrize("value", [{"a": "zebraquartz"}, ["zebraquartz", 5], {"text": ["zebraquartz"]}])
def test_the_log_of_a_refused_request_has_nothing_of_its_prompt(server: Server, value: object) -> None:
    body = json.dumps({"model": MODEL, "prompt": value}).encode()
    assert server.post("/v1/completions", body).status == 400
    # The line of a request is written after its answer, in order.
    path = server.home / "logs" / "gateway.log"
    deadline = time.monotonic() + 60
    # What stands behind the last newline is not written in full.
    while not (lines := [line for line in map(json.loads, path.read_text().split("\n")[:-1]) if line.get("error")]):
        assert time.monotonic() < deadline
        server.post("/v1/completions", b"{")
    assert "INVALID_REQUEST" in {line["error"] for line in lines}
    assert "zebraquartz" not in path.read_text()


@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize(("field", "status"), [("Content-Type: application/", 400), ("Content-Encoding: ", 415)])
def test_a_header_that_is_not_utf8_is_refused(server: Server, field: str, status: int, is_keyed: bool) -> None:
    head = "POST /v1/generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n"
    kind = "" if "Type" in field else "Content-Type: application/json\r\n"
    key = f"Idempotency-Key: not-utf8-{status}\r\n" if is_keyed else ""
    sent = f"{head}{kind}{key}{field}".encode() + b"\xff\r\n\r\n{}"
    (answer,) = split_responses(exchange(server.port, sent), "POST")
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (status, "INVALID_REQUEST") and "\\udcff" in error["message"]
