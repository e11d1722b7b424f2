"""Answers of other engines that are more than one text: tool calls, JSON, log probabilities, several choices."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pipeline.api.output_text import FIXED, TEXT, TextSoFar
from pipeline.api.output_tokens import RELAY
from pipeline.errors import InvalidRequest, ModelUnavailable
from stages.agent.engines.door import door
from stages.agent.engines.door.answer_form import AnswerForm
from stages.agent.engines.door.event_stream import EventStream
from stages.agent.engines.door.request_body import read
from stages.agent.engines.external_engine import DIALECTS
from tests.fleet.stand_in_engine import expected
from tests.fleet.test_other_engines import CHAT, NAMED, PROMPT, STRICT, TOOLS, Site, called


def events_of(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with aiohttp.ClientSession() as session:
        made = Site(tmp_path, session)
        yield made
        await made.engine.stop(at_once=True)


def test_of_vllm_arguments_match_their_schema_in_forced_calls() -> None:
    for choice in ("required", NAMED):
        body = json.dumps({**CHAT, "tools": STRICT, "tool_choice": choice}).encode()
        read("/v1/chat/completions", body, "application/json", DIALECTS["vllm"])
    body = json.dumps({**CHAT, "tools": STRICT}).encode()
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function.strict is not possible"):
        read("/v1/chat/completions", body, "application/json", DIALECTS["vllm"])


def test_what_the_chat_template_leaves_out_is_refused() -> None:
    """llama-server would answer as if the request had no tools."""
    dialect = DIALECTS["llama-server"]
    gaps = dialect.template({"chat_template_caps": {"supports_tools": False, "supports_tool_calls": False}})
    assert gaps == dialect.template({}) == (False, False)
    both = dialect.template({"chat_template_caps": {"supports_tools": True, "supports_tool_calls": True}})
    for fields, param in (({"tools": TOOLS}, "tools"), ({"messages": called("{}")}, "messages[1].tool_calls")):
        body = json.dumps({**CHAT, **fields}).encode()
        with pytest.raises(InvalidRequest, match="chat template has no place") as refused:
            read("/v1/chat/completions", body, "application/json", dialect, gaps)
        assert refused.value.param == param
        read("/v1/chat/completions", body, "application/json", dialect, both)
    body = json.dumps({**CHAT, "tools": TOOLS, "tool_choice": "none"}).encode()
    read("/v1/chat/completions", body, "application/json", dialect, gaps)


async def test_a_call_is_streamed_as_it_is_written_and_given_whole(site: Site) -> None:
    await site.start()
    chat = {**CHAT, "messages": called('{"y": [1, "\u00e9"]}'), "tools": TOOLS, "parallel_tool_calls": False}
    text = expected("helloseen", 8)[1:]
    status, body = await site.post("/v1/chat/completions", chat)
    assert status == 200, body
    whole = json.loads(body)
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"x": text})}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert whole["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}]
    assert whole["usage"]["completion_tokens"] == 8
    (sent,) = site.requests()
    assert sent["tools"] == TOOLS and sent["tool_choice"] == "auto" and sent["parallel_tool_calls"] is False
    assert [one["content"] for one in sent["messages"]] == ["hello", "", "seen"]
    assert json.loads(sent["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"y": [1, "\u00e9"]}
    assert sent["messages"][2]["tool_call_id"] == "c"
    _, stream = await site.post("/v1/chat/completions", {**chat, "stream": True}, **{RELAY: "1"})
    first, *deltas, last = [one["choices"][0] for one in events_of(stream)]
    assert first["delta"] == {"role": "assistant", "content": ""} and last["finish_reason"] == "tool_calls"
    assert deltas[0]["delta"] == {"tool_calls": [{"index": 0, **call, "function": {"name": "look", "arguments": ""}}]}
    written = [one["delta"]["tool_calls"][0]["function"]["arguments"] for one in deltas]
    assert "".join(written) == json.dumps({"x": text}) and stream.count(b": text ") == 9
    for choice, named in (("required", "required"), (NAMED, NAMED), ("none", None)):
        status, body = await site.post("/v1/chat/completions", {**chat, "tool_choice": choice})
        assert status == 200, body
        reason = json.loads(body)["choices"][0]["finish_reason"]
        assert reason == ("tool_calls" if named else "length"), "also of a named call, as at our servers"
        sent = site.requests()[-1]
        assert sent.get("tool_choice") == named and ("tools" in sent) == bool(named)
        assert all(tool["function"]["strict"] for tool in sent.get("tools", []))


async def test_the_form_of_an_answer_is_asked_for(site: Site) -> None:
    await site.start()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for given, sent in (
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "text"}, None),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {**schema, "additionalProperties": False},
                    "strict": True,
                },
            },
        ),
    ):
        status, body = await site.post("/v1/chat/completions", {**CHAT, "response_format": given})
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == expected("hello", 8)
        assert site.requests()[-1].get("response_format") == sent


async def test_logprobs_have_openais_form(site: Site) -> None:
    await site.start()
    text = expected("hello", 8)
    tokens = [{"token": one, "logprob": -float(index), "bytes": [ord(one)]} for index, one in enumerate(text)]
    for n_top in (0, 2):
        chat = {**CHAT, "logprobs": True, **({"top_logprobs": n_top} if n_top else {})}
        _, body = await site.post("/v1/chat/completions", chat)
        found = json.loads(body)["choices"][0]["logprobs"]
        assert found == {"content": [{**one, "top_logprobs": n_top * [one]} for one in tokens], "refusal": None}
        _, stream = await site.post("/v1/chat/completions", {**chat, "stream": True})
        pieces = [one["choices"][0].get("logprobs") for one in events_of(stream)]
        assert [entry for piece in pieces if piece for entry in piece["content"]] == found["content"]
    _, body = await site.post("/v1/completions", {**PROMPT, "logprobs": 1})
    found = json.loads(body)["choices"][0]["logprobs"]
    assert found["tokens"] == list(expected("once", 8)) and found["text_offset"] == list(range(8))
    assert found["token_logprobs"] == [-float(index) for index in range(8)]
    assert found["top_logprobs"] == [{one: -float(index)} for index, one in enumerate(expected("once", 8))]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_several_choices_are_told_apart_and_counted_together(site: Site, path: str, body: dict[str, Any]) -> None:
    await site.start()
    text = expected("once" if body is PROMPT else "hello", 8)
    _, answer = await site.post(path, {**body, "n": 3})
    whole = json.loads(answer)
    shown = [one["text"] if body is PROMPT else one["message"]["content"] for one in whole["choices"]]
    assert shown == 3 * [text] and [one["index"] for one in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 24 and site.requests()[-1]["n"] == 3
    asked = {**body, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    _, stream = await site.post(path, asked, **{RELAY: "1"})
    *events, usage = events_of(stream)
    for index in range(3):
        choices = [one["choices"][0] for one in events if one["choices"][0]["index"] == index]
        assert "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices) == text
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]
    assert usage["usage"]["completion_tokens"] == 24
    counted = [int(one) for one in re.findall(rb": text (\d+)", stream)]
    assert counted == [*range(1, 25), 24]


async def test_a_stream_that_cannot_go_on_says_so_before_its_first_piece(site: Site) -> None:
    await site.start()
    schema = {"response_format": {"type": "json_object"}}
    for fields in ({"n": 2}, {"logprobs": True}, {"tools": TOOLS}, schema, {}, {"tools": TOOLS, "tool_choice": "none"}):
        body = json.dumps({**CHAT, **fields, "stream": True}).encode()
        headers = {"Authorization": f"Bearer {site.engine.key}", "Content-Type": "application/json"}
        async with site.session.post(f"{site.engine.url}/v1/chat/completions", data=body, headers=headers) as answer:
            is_fixed = answer.headers.get(TEXT) == FIXED
            assert is_fixed == (fields != {} and "tool_choice" not in fields), fields
            await answer.read()
        status, refused = await site.post(
            "/v1/chat/completions", {**CHAT, **fields, "stream": True}, TextSoFar(text="x", tokens=1)
        )
        assert status == (400 if is_fixed else 200) and (b"cannot go on" in refused) == is_fixed


async def test_a_call_that_breaks_off_is_an_error_that_ends_its_choices(site: Site) -> None:
    await site.start()
    site.control("error")
    _, stream = await site.post("/v1/chat/completions", {**CHAT, "n": 2, "tools": TOOLS, "stream": True})
    last = json.loads(stream.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last["error"]["code"] == "MODEL_UNAVAILABLE" and [one["index"] for one in last["choices"]] == [0, 1]
    status, answer = await site.post("/v1/chat/completions", {**CHAT, "tools": TOOLS})
    assert (status, json.loads(answer)["error"]["code"]) == (503, "MODEL_UNAVAILABLE")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("control", "fields", "said"),
    [
        ("no-parser", {"tools": TOOLS}, "--tool-call-parser to be set"),
        ("bad-schema", {"response_format": {"type": "json_object"}}, "Grammar error: Invalid type: nonsense"),
    ],
)
async def test_what_an_engine_refuses_has_its_words(
    site: Site, control: str, fields: dict[str, Any], said: str, is_stream: bool
) -> None:
    await site.start()
    site.control(control)
    status, answer = await site.post("/v1/chat/completions", {**CHAT, **fields, "stream": is_stream})
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, "INVALID_REQUEST") and said in error["message"]
    assert "vllm refuses the request" in error["message"] and len(error["message"]) < 600


async def test_a_whole_answer_has_a_bound(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.start()
    monkeypatch.setattr(door, "MAX_WHOLE", 300)
    assert (await site.post("/v1/chat/completions", {**CHAT, "tools": TOOLS}))[0] == 200
    for fields in ({"tools": TOOLS, "max_tokens": 50}, {"logprobs": True}, {"n": 7}):
        status, answer = await site.post("/v1/chat/completions", {**CHAT, **fields})
        assert status == 413 and b"may have more than 300 bytes" in answer


async def test_whole_answers_have_a_bound_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.start()
    monkeypatch.setattr(door, "MAX_KEPT", 300)
    long = {**CHAT, "tools": TOOLS, "max_tokens": 50}
    assert (await site.post("/v1/chat/completions", long))[0] == 200, "small beside what others may hold"
    monkeypatch.setattr(door, "SMALL", 300)
    for _ in range(2):  # what an answer has held is free after its end
        status, answer = await site.post("/v1/chat/completions", long)
        assert status == 503 and b"that are not streamed have more than 300 bytes together" in answer
        assert (await site.post("/v1/chat/completions", {**CHAT, "tools": TOOLS}))[0] == 200


EVENT = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}}


@pytest.mark.parametrize(
    ("form", "choice"),
    [
        (AnswerForm(True), EVENT),
        (AnswerForm(True), {"index": 1, "delta": {"content": "x"}}),
        (AnswerForm(True), {"index": 0, "delta": {}, "finish_reason": "tool_calls"}),
        (AnswerForm(True, has_calls=True), {"index": 0, "delta": {"tool_calls": [{"index": 128}]}}),
        (AnswerForm(True, has_calls=True), {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": 1}]}}),
        (AnswerForm(True, has_logprobs=True), {"index": 0, "delta": {}, "logprobs": {"content": [1]}}),
        (AnswerForm(True, has_logprobs=True), {"index": 0, "delta": {}, "logprobs": 1}),
        (AnswerForm(False, has_logprobs=True), {"index": 0, "text": "", "logprobs": {"content": []}}),
    ],
)
def test_what_was_not_asked_for_is_no_answer(form: AnswerForm, choice: dict[str, Any]) -> None:
    stream = EventStream(DIALECTS["vllm"], form)
    with pytest.raises(ModelUnavailable):
        list(stream.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"))


def test_llama_server_counts_each_choice_for_itself() -> None:
    """Its event without a choice has the tokens of the choice that has ended."""
    stream = EventStream(DIALECTS["llama-server"], AnswerForm(True, 2))

    def event(choice: int | None, n: int) -> bytes:
        choices = [] if choice is None else [{"index": choice, "delta": {"content": "x"}}]
        return b"data: " + json.dumps({"choices": choices, "timings": {"predicted_n": n}}).encode() + b"\n\n"

    sent = [event(0, 1), event(1, 1), event(0, 2), event(None, 3), event(1, 2), event(None, 5)]
    assert [piece.tokens for piece in stream.feed(b"".join(sent))] == [1, 2, 3, 4, 5, 8]
