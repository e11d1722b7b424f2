"""/v1/messages: Anthropic's requests, answers, events, errors and headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.gateway.http_client import Answer
from tests.gateway.peers import MODEL
from tests.gateway.server import LONG_MINUTE, Server

TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS = '<tool_call>\\n{"name": "weather", "arguments": {"city": "Paris"}}\\n</tool_call>'
ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2.50]}}</tool_call>'
ROME_INPUT = {"city": "Rome", "days": [1, 2.5]}
SINGLE = {"type": "auto", "disable_parallel_tool_use": True}
PATH = "/v1/messages"
CLEAR = "clear_thinking_20251015"
NO_TURNS = {"type": "thinking_turns", "value": 0}
FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def message(say: str, **more: Any) -> dict[str, Any]:
    """A request whose answer is `say`."""
    messages = [{"role": "user", "content": f"please say {say}"}]
    return {"model": MODEL, "max_tokens": 280, "messages": messages, "tools": [TOOL], "seed": 1, **more}


def prompt(server: Server) -> str:
    """The prompt of the last request."""
    return bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()


class NamedEvent(NamedTuple):
    id: str
    name: str
    data: Any


def read_events(server: Server, path: str, body: Any, headers: dict[str, str] | None = None) -> list[NamedEvent]:
    """All events of a stream; `body` None: of a GET."""
    more = {**body, "stream": True} if body is not None else None
    answer = server.request("POST" if body is not None else "GET", path, more, headers)
    assert answer.status == 200, answer.body
    return parse_events(answer.body)


def parse_events(data: bytes) -> list[NamedEvent]:
    """Parse a stream of events. It may be cut off in an event."""
    events = []
    for block in data.decode("utf-8", "ignore").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(("retry", ":")))
        if not fields:
            continue
        event = NamedEvent(fields["id"], fields["event"], json.loads(fields["data"]))
        assert event.data["type"] == event.name
        events.append(event)
    return events


def assembled(events: list[NamedEvent]) -> dict[str, Any]:
    """The message that a client makes of the events. Checks their order."""
    names = [event.name for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    whole: dict[str, Any] = {}
    texts: list[str] = []
    is_open = False
    for event in events:
        data = event.data
        match event.name:
            case "message_start":
                whole = deepcopy(data["message"])
                assert whole["content"] == []
                assert whole["stop_reason"] is None
            case "content_block_start":
                assert not is_open
                assert data["index"] == len(whole["content"])
                assert data["content_block"].get("text", "") == ""
                assert data["content_block"].get("input", {}) == {}
                whole["content"].append(dict(data["content_block"]))
                texts.append("")
                is_open = True
            case "content_block_delta":
                assert is_open
                assert data["index"] == len(whole["content"]) - 1
                kind = {"text": "text_delta", "tool_use": "input_json_delta"}[whole["content"][-1]["type"]]
                assert data["delta"]["type"] == kind
                texts[-1] += data["delta"]["text" if kind == "text_delta" else "partial_json"]
            case "content_block_stop":
                assert is_open
                assert data["index"] == len(whole["content"]) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                whole |= data["delta"]
                whole["usage"] |= data["usage"]
            case _:
                assert event.name in ("ping", "message_stop")
    for block, text in zip(whole["content"], texts, strict=True):
        if block["type"] == "text":
            block["text"] = text
        else:
            block["raw"] = text
    if whole["content"]:
        assert names[1:3] == ["content_block_start", "ping"]
        assert names.count("ping") == 1
    return whole


TEXT = {"type": "text"}
ANSWERS: list[tuple[str, dict[str, Any], list[Any], str, str | None]] = [
    ("Hello ä\\n <b>", {}, ["Hello ä\n <b>"], "end_turn", None),
    ("Hello", {"tools": []}, ["Hello"], "end_turn", None),
    (PARIS, {}, [{"city": "Paris"}], "tool_use", None),
    (f"I look.\\n{PARIS}\\n{ROME} Done.", {}, ["I look.", {"city": "Paris"}, ROME_INPUT, "Done."], "tool_use", None),
    (f"{PARIS}{ROME}", {"tool_choice": SINGLE}, [{"city": "Paris"}], "tool_use", None),
    (PARIS, {"tool_choice": {"type": "none"}}, [PARIS.replace("\\n", "\n")], "end_turn", None),
    ("Hello world", {"stop_sequences": ["x", "wo"]}, ["Hello "], "stop_sequence", "wo"),
    ("Hello world", {"max_tokens": 4}, ["Hell"], "max_tokens", None),
    (ROME, {"max_tokens": 68}, [{"city": "Rome"}], "max_tokens", None),
    ("\\n", {"max_tokens": 1, "stop_sequences": ["\n"]}, [], "stop_sequence", "\n"),
]


@pytest.mark.parametrize(("say", "more", "content", "reason", "stop"), ANSWERS)
def test_answers(
    server: Server, say: str, more: dict[str, Any], content: list[Any], reason: str, stop: str | None
) -> None:
    answer = server.post(PATH, message(say, **more))
    assert answer.status == 200
    body = answer.json
    assert list(body) == ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert body["id"].startswith("msg_")
    assert [block["text"] if block["type"] == "text" else block["input"] for block in body["content"]] == content
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    n_prompt = len(prompt(server).encode())
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    assert usage["cache_read_input_tokens"] == 3
    assert usage["output_tokens"] > 0
    streamed = assembled(read_events(server, PATH, message(say, **more)))
    for block in streamed["content"]:
        raw = block.pop("raw", None)
        if raw is not None and reason != "max_tokens":
            block["input"] = json.loads(raw)
        elif raw is not None:
            assert raw.startswith('{"city": "Rome", "d')
            block["input"] = {"city": "Rome"}
    assert {**streamed, "id": ""} == {**body, "id": ""}


@pytest.mark.parametrize("say", [f"I look.\\n{PARIS}\\n{ROME} Done.", f"{PARIS}<tool_call>no", "", "Hi"])
def test_a_stream_can_be_resumed_after_each_event(server: Server, say: str) -> None:
    """Also between two events of one token: no event is missing or repeated, and the bytes are the same."""
    events = read_events(server, PATH, message(say))
    whole = assembled(events)
    assert len({event.id for event in events}) == len(events)
    for received, event in enumerate(events[:-1], 1):
        rest = read_events(server, f"/v1/requests/{event.id.partition(':')[0]}", None, {"Last-Event-ID": event.id})
        assert assembled([*events[:received], *rest]) == whole
        again = read_events(server, PATH, {}, {"Last-Event-ID": event.id})
        assert again == rest
    last = read_events(server, PATH, {}, {"Last-Event-ID": events[-1].id})
    assert last == []


def test_a_stream_outlives_the_gateway(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.wait_ready()
    peers, body = server.peers, message(f"I look.\\n{ROME}\\n{PARIS}")
    whole = assembled(read_events(server, PATH, body))
    peers.do(lambda: setattr(peers, "step_interval_s", 0.02))
    connection = server.connect()
    data = json.dumps({**body, "stream": True}).encode()
    connection.request("POST", PATH, data, {"Content-Type": "application/json"})
    response, received = connection.getresponse(), b""
    while b"input_json_delta" not in received:
        received += response.read1(64)
    peers.do(lambda: setattr(peers, "is_stepping", False))
    server.kill_and_restart()
    response.close()
    connection.close()
    peers.do(peers.kill_scheduler)
    peers.do(peers.start_scheduler)
    peers.do(lambda: setattr(peers, "tokens_per_step", 7))
    peers.do(lambda: setattr(peers, "is_stepping", True))
    begun = parse_events(received)
    for name in {begun[-1].id, next(a.id for a, b in pairwise(begun) if "-" in a.id)}:
        before = begun[: [event.id for event in begun].index(name) + 1]
        rest = read_events(server, f"/v1/requests/{name.partition(':')[0]}", None, {"Last-Event-ID": name})
        got = assembled([*before, *rest])
        assert {**got, "id": "", "usage": 0} == {**whole, "id": "", "usage": 0}
        server.kill_and_restart()


def test_the_prompt(server: Server) -> None:
    """System blocks, text blocks, calls, results and a last message of the assistant; cache_control is a hint."""
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    now = {"type": "text", "text": "Now."}
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", **hint}, {"type": "text", "text": "Be kind."}],
        "tools": [{**TOOL, **hint, "type": "custom"}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Weather?", **hint}, now],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, {**call, **hint}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
            {"role": "system", "content": "Hurry."},
            {"role": "user", "content": "please say it"},
        ],
    }
    assert server.post(PATH, body).status == 200
    shown = prompt(server)
    assert shown.startswith("system: Be brief.\nBe kind.\n\n# Tools")
    assert '"name":"weather","description":"The weather in a city."' in shown
    assert shown.endswith(
        "user: Weather?\nNow.\n"
        'assistant: I look.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Paris"}}\n</tool_call>\n'
        "user: <tool_response>\nsunny\n</tool_response>\nAnd?\nsystem: Hurry.\nuser: please say it\n"
    )
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no city", "is_error": True}
    body["messages"][2:] = [{"role": "user", "content": [failed]}]  # type: ignore[index]
    assert server.post(PATH, body).status == 200
    assert "<tool_response>\nError: no city\n</tool_response>" in prompt(server)
    counted = {name: body[name] for name in ("model", "system", "tools", "messages")}
    assert server.post(f"{PATH}/count_tokens", counted).json == {"input_tokens": len(prompt(server).encode())}


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    question = {"role": "user", "content": "{arguments}"}
    for messages in ([question], [question, {"role": "assistant", "content": "The best answer is ("}]):
        body = {"model": MODEL, "max_tokens": 5, "messages": messages}
        assert server.post(PATH, body).status == 200
        arguments = json.loads(prompt(server).split("\n")[0].removeprefix("user: "))
        begins, continues = arguments[0], arguments[-1]
        assert (begins, continues) == (len(messages) == 1, len(messages) == 2)


def _content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": role, "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 'messages[0].role is "tool"'),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content is empty"),
    (_content(), "messages[1].content is empty"),
    (_content(IMAGE), 'messages[1].content[0].type is "image"; this server accepts text, tool_result here'),
    (_content({"type": "document", "source": {}}), 'type is "document"'),
    (_content({"type": "thinking", "thinking": "x", "signature": ""}), 'type is "thinking"'),
    (_content({"type": "redacted_thinking", "data": "x"}, role="assistant"), 'type is "redacted_thinking"'),
    (_content({**RESULT, "content": [IMAGE]}), "messages[1].content[0].content[0].type"),
    (_content(RESULT), 'messages[1].tool_use_id is "t1"'),
    (_content(USE, role="assistant"), 'the tool call "t1" has no result'),
    (_content({**USE, "input": "{}"}, role="assistant"), "messages[1].content[0].input"),
    (_content({"type": "text", "text": "so "}, role="assistant"), "ends with white space"),
    (_content({"type": "text", "text": "x", "cache_control": {"type": "forever"}}), "cache_control.type"),
    ({"temperature": 1.5}, "temperature is 1.5"),
    ({"top_p": 0}, "top_p is 0"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "at most 16"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "template has none"),
    ({"tool_choice": {"type": "any"}, "tools": []}, "there are no tools"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "'f', which is not one of the tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name is given"),
    ({"output_config": {"effort": "none"}}, "output_config.effort is"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    (
        {"context_management": {"edits": [{"type": CLEAR, "keep": {"type": "thinking_turns", "value": 0}}]}},
        "keep.value",
    ),
    ({"context_management": {"edits": [{"type": CLEAR}, {"type": CLEAR}]}}, "edits[1].type"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema is missing"),
    ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "both constrain the output"),
    ({"n": 2}, "unknown parameter n"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
]


def error(answer: Answer, kind: str) -> str:
    """The message of an error in Anthropic's form."""
    assert answer.json["type"] == "error"
    assert set(answer.json["error"]) == {"type", "message"}
    assert answer.json["error"]["type"] == kind
    text: str = answer.json["error"]["message"]
    return text


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_refused(server: Server, change: dict[str, Any], expected: str) -> None:
    answer = server.post(PATH, {**message("x"), **change})
    assert answer.status == 400
    assert expected in error(answer, "invalid_request_error")


def test_errors_have_the_form_of_the_api(server: Server) -> None:
    answer = server.post(PATH, message("x", model="byts"), {"X-Request-Id": "mine"})
    assert answer.status == 404
    assert "byts" in error(answer, "not_found_error")
    assert answer.json["request_id"] == answer.headers["Request-Id"] == "mine"
    assert server.get(PATH).status == 405
    assert "use POST" in error(server.get(PATH), "invalid_request_error")
    for version, status in [("2023-01-01", 400), ("latest", 400), ("2023-06-01", 200), ("2026-10-21", 200)]:
        answer = server.post(PATH, message("x"), {"Anthropic-Version": version})
        assert answer.status == status
        if status == 400:
            assert "2023-06-01" in error(answer, "invalid_request_error")
    counted = server.post(f"{PATH}/count_tokens", {**message("x")})
    assert "max_tokens" in error(counted, "invalid_request_error")


def test_the_error_of_a_stream_names_its_request(server: Server) -> None:
    with server.peers.held():
        stream = server.stream(PATH, message("x"), {"X-Request-Id": "mine"})
        name = stream.response.headers["X-Starling-Request"]
        assert server.request("DELETE", f"/v1/requests/{name}").status == 200
        last = parse_events(stream.response.read())[-1]
        stream.close()
    assert (last.name, last.data["error"]["type"]) == ("error", "invalid_request_error")
    assert last.data["request_id"] == "mine"


def test_keys(make_server: Callable[..., Server]) -> None:
    server = make_server(
        auth={"api_keys": [{"key": "sk-mine", "tenant": "mine"}]},
        rate_limits={"requests_per_minute": 2},
        preamble=LONG_MINUTE,
    )
    server.wait_ready()
    assert server.post(PATH, message("x"), {"X-Api-Key": "sk-mine"}).status == 200
    assert server.post(PATH, message("x"), {"Authorization": "Bearer sk-mine"}).status == 200
    for headers in ({}, {"X-Api-Key": "sk-other"}):
        answer = server.post(PATH, message("x"), headers)
        assert answer.status == 401
        error(answer, "authentication_error")
    limited = server.post(PATH, message("x"), {"X-Api-Key": "sk-mine"})
    assert limited.status == 429
    assert int(limited.headers["Retry-After"]) > 0
    error(limited, "rate_limit_error")


def test_the_official_client(server: Server) -> None:
    """A round trip with a real function, streamed and not; the errors have the client's classes."""
    anthropic = pytest.importorskip("anthropic")
    seen: list[str] = []

    def weather(city: str) -> str:
        seen.append(city)
        return f"{city}: 21 degrees"

    base_url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": f"please say I look.\\n{PARIS}"}]
        options = {"model": MODEL, "max_tokens": 100, "tools": [TOOL]}
        with client.messages.stream(messages=messages, **options) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert "input_json" in kinds
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        assert answer.stop_reason == "tool_use"
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert client.messages.create(messages=messages, **options).content[1].input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result, {"type": "text", "text": "please say It is 21 degrees."}]},
        ]
        counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL])
        final = client.messages.create(messages=messages, **options)
        assert final.content[0].text == "It is 21 degrees."
        assert final.stop_reason == "end_turn"
        assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted.input_tokens
        assert "Paris: 21 degrees" in prompt(server)
        with pytest.raises(anthropic.BadRequestError, match="has no result"):
            client.messages.create(messages=messages[:2], **options)
        with pytest.raises(anthropic.NotFoundError, match="nothing"):
            client.messages.create(messages=messages, model="nothing", max_tokens=1)
    assert seen == ["Paris"]


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORMAT, "effort": "high"}}, {"output_format": FORMAT}, {"tools": None}]
)
def test_a_schema_constrains_the_answer(server: Server, fields: dict[str, Any]) -> None:
    """Beside tools, and without them."""
    more = {"output_config": {"format": FORMAT}} if fields == {"tools": None} else {}
    assert server.post(PATH, message('{"a": 1}', **fields, **more)).status == 200
    constraint = server.peers.generator.submitted[-1].constraint
    assert constraint is not None
    assert constraint.field == ("output_format.schema" if "output_format" in fields else "output_config.format.schema")
    assert '"additionalProperties"' in constraint.text.replace("\\", "")
