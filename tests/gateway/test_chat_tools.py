"""Tools in chats: what is refused, how the prompt shows them, and calls in whole and streamed answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.api.requests.chat import read
from tests.gateway.http_client import Event
from tests.gateway.peers import MODEL
from tests.gateway.server import Server

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PARIS = '<tool_call>\\n{"name": "weather", "arguments": {"city": "Paris"}}\\n</tool_call>'
PARIS_CALL = PARIS.replace("\\n", "\n").removesuffix("\n</tool_call>")
ROME_ARGUMENTS = '{"city": "Rome", "days": [1, 2]}'
ROME = f'<tool_call>{{"name": "weather", "arguments": {ROME_ARGUMENTS}}}</tool_call>'


def chat(say: str, **more: Any) -> dict[str, Any]:
    """A chat whose answer is `say`."""
    messages = [{"role": "user", "content": f"please say {say}"}]
    return {"model": MODEL, "messages": messages, "tools": [WEATHER], "seed": 1, **more}


def history(**changes: Any) -> list[dict[str, Any]]:
    """A chat with a call and its result. `changes`: of the result, or with `call_` of the call's function."""
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    function |= {name[5:]: value for name, value in changes.items() if name.startswith("call_")}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    result |= {name: value for name, value in changes.items() if not name.startswith("call_")}
    call = {"id": "c1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result,
    ]


def accumulated(events: list[Event]) -> dict[int, dict[str, Any]]:
    """The messages that a client makes of the events of a stream, with their finish reasons, by choice."""
    messages: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in event.data["choices"]:
            message = messages.setdefault(choice["index"], {"content": "", "tool_calls": [], "finish": None})
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                if part["index"] == len(message["tool_calls"]):
                    assert part["type"] == "function"
                    message["tool_calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            message["finish"] = choice["finish_reason"] or message["finish"]
    return messages


def whole(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The messages of a whole answer in the form of `accumulated`."""
    messages = {}
    for choice in body["choices"]:
        message = choice["message"]
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
        assert message["content"] is not None or calls
        messages[choice["index"]] = {
            "content": message["content"] or "",
            "tool_calls": calls,
            "finish": choice["finish_reason"],
        }
    return messages


ANSWERS: list[tuple[str, dict[str, Any], str, list[str], str]] = [
    (PARIS, {}, "", ['{"city": "Paris"}'], "tool_calls"),
    (
        f"I look.\\n{PARIS}\\n{ROME}",
        {},
        "I look.",
        ['{"city": "Paris"}', ROME_ARGUMENTS],
        "tool_calls",
    ),
    (f"{PARIS}\\n{ROME}", {"parallel_tool_calls": False}, "", ['{"city": "Paris"}'], "tool_calls"),
    ("Hello ä\\n <b>", {}, "Hello ä\n <b>", [], "stop"),
    ("<tool_call>\\nsunny</tool_call>", {}, "<tool_call>\nsunny</tool_call>", [], "stop"),
    ("<tool_call>", {}, "<tool_call>", [], "stop"),
    (PARIS, {"tool_choice": "none"}, PARIS.replace("\\n", "\n"), [], "stop"),
    (PARIS, {"max_tokens": 54}, "", ['{"city": '], "length"),
    (PARIS, {"max_tokens": 20}, '<tool_call>\n{"name":'[:20], [], "length"),
    (PARIS, {"stop": ["Par"]}, "", ['{"city": "'], "tool_calls"),
    (f"A{PARIS}", {"n": 2}, "A", ['{"city": "Paris"}'], "tool_calls"),
]


@pytest.mark.parametrize(("say", "more", "content", "arguments", "finish"), ANSWERS)
def test_calls_in_answers(
    server: Server, say: str, more: dict[str, Any], content: str, arguments: list[str], finish: str
) -> None:
    """Whole and streamed answers have the same calls with the same ids, and so has the same request again."""
    body = chat(say, **more)
    answers = whole(server.post("/v1/chat/completions", body).json)
    assert len(answers) == more.get("n", 1)
    for answer in answers.values():
        assert answer["content"] == content
        assert [call["arguments"] for call in answer["tool_calls"]] == arguments
        assert answer["finish"] == finish
    ids = [call["id"] for answer in answers.values() for call in answer["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert accumulated(server.stream("/v1/chat/completions", body).all()) == answers
    assert whole(server.post("/v1/chat/completions", body).json) == answers


@pytest.mark.parametrize("more", [{}, {"max_tokens": len(PARIS_CALL)}, {"logprobs": True}])
def test_an_answer_that_may_have_one_call_ends_with_it(server: Server, more: dict[str, Any]) -> None:
    """Tokens are bytes here: none is generated for the closing tag and what follows it."""
    body = chat(f"{PARIS}\\n{ROME}", parallel_tool_calls=False, stream_options={"include_usage": True}, **more)
    answer = server.post("/v1/chat/completions", {**body, "stream_options": None}).json
    *_, last, _ = server.stream("/v1/chat/completions", body).all()
    for usage in (answer["usage"], last.data["usage"]):
        assert usage["completion_tokens"] == len(PARIS_CALL)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls"]
    assert [call["function"]["arguments"] for call in answer["choices"][0]["message"]["tool_calls"]] == [
        '{"city": "Paris"}'
    ]


def test_arguments_are_streamed_as_they_are_generated(server: Server) -> None:
    deltas = [
        part
        for event in server.stream("/v1/chat/completions", chat(ROME)).all()[:-1]
        for part in event.data["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(deltas) > 10
    assert deltas[0]["function"] == {"name": "weather", "arguments": "{"}
    assert all("id" not in delta for delta in deltas[1:])


def streamed_logprobs(events: list[Event]) -> list[Any]:
    """The entries of `logprobs.content` of all events but the last."""
    return [
        entry
        for event in events[:-1]
        for choice in event.data["choices"]
        if choice["logprobs"] is not None
        for entry in choice["logprobs"]["content"]
    ]


def test_logprobs_of_an_answer_with_calls(server: Server) -> None:
    body = chat(f"A{PARIS}B", logprobs=True, top_logprobs=1)
    answer = server.post("/v1/chat/completions", body).json["choices"][0]
    events = server.stream("/v1/chat/completions", body).all()
    streamed = streamed_logprobs(events)
    assert streamed == answer["logprobs"]["content"]
    assert "".join(entry["token"] for entry in streamed) == f"A{PARIS}B".replace("\\n", "\n")
    assert accumulated(events) == whole({"choices": [answer]})


def test_logprobs_of_a_token_that_only_ends_a_call(server: Server) -> None:
    """The last token completes a stop string within the arguments: no part of it is text."""
    body = chat(PARIS, logprobs=True, stop=["aris"])
    answer = server.post("/v1/chat/completions", body).json["choices"][0]
    events = server.stream("/v1/chat/completions", body).all()
    streamed = streamed_logprobs(events)
    assert answer["message"]["tool_calls"]
    assert streamed == answer["logprobs"]["content"]


@pytest.mark.parametrize("say", [f"I look.\\n{PARIS}\\n{ROME} Done", f"{PARIS}<tool_call>no"])
def test_a_stream_can_be_resumed_after_each_event(server: Server, say: str) -> None:
    events = server.stream("/v1/chat/completions", chat(say)).all()
    message = accumulated(events)
    for received, event in enumerate(events[:-1], 1):
        rest = server.resume(f"/v1/requests/{event.id.partition(':')[0]}", {"Last-Event-ID": event.id}).all()
        assert accumulated([*events[:received], *rest]) == message


def test_the_prompt_shows_tools_and_calls_as_text(server: Server) -> None:
    """The model's template has no place for tools."""
    messages = [*history(), {"role": "user", "content": "please say so"}]
    server.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": [WEATHER]})
    prompt = bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()
    assert json.dumps(WEATHER["function"], separators=(",", ":")) in prompt
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":"Paris"}}\n</tool_call>'
    assert f"assistant: {call}\nuser: <tool_response>\nsunny\n</tool_response>\nplease say so\n" in prompt


def test_a_request_without_tools_to_call_has_no_tools_in_its_prompt(server: Server) -> None:
    bodies = [{"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "auto"}]
    for body in bodies:
        server.post("/v1/chat/completions", {**chat("so"), "tools": None, **body})
        assert b"weather" not in bytes(server.peers.generator.submitted[-1].prompt[::4])


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "an array of tools"),
    ({"tools": [5]}, "tools[0]", "an object"),
    ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]", "'weather' of a tool before it"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", '"function" only'),
    (_tool(name="a b"), "tools[0].function.name", "letters, digits"),
    (_tool(parameters=[]), "tools[0].function.parameters", "an object"),
    (_tool(parameters={"minimum": 1 << 65}), "tools[0].function.parameters", "64 bits"),
    (_tool(description=5), "tools[0].function.description", "a string"),
    (_tool(returns={}), "tools[0].function.returns", "unknown parameter"),
    ({"tool_choice": "often"}, "tool_choice", '"none", "auto"'),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", '"function" only'),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not one of the tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"messages": history()[:2]}, "messages[1]", '"c1" has no result'),
    ({"messages": [*history()[:2], {"role": "user", "content": "x"}]}, "messages[2]", 'the tool call "c1"'),
    ({"messages": [*history(), history()[2]]}, "messages[3].tool_call_id", "each call has one result"),
    ({"messages": history(tool_call_id="c2")}, "messages[2].tool_call_id", 'is "c2"'),
    ({"messages": history(name="sum")}, "messages[2].tool_call_id", "'weather'"),
    ({"messages": history(call_arguments={})}, "messages[1].tool_calls[0].function.arguments", "a string"),
    ({"messages": history(call_name="")}, "messages[1].tool_calls[0].function.name", "letters"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "an assistant's message",
    ),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": "x"}, history()[2]]}, "messages[1].tool_call_id", 'is "c1"'),
]


@pytest.mark.parametrize(("change", "param", "message"), REFUSED)
def test_refused(server: Server, change: dict[str, Any], param: str, message: str) -> None:
    answer = server.post("/v1/chat/completions", {**chat("x"), **change})
    assert answer.status == 400
    assert message in answer.error["message"]
    assert answer.error["param"] == param


@pytest.mark.parametrize("written", ['{"city": "Par', "Paris", "[1]", '{"n": 1e999}', '{"a": 1, "a": 2}'])
def test_arguments_that_are_no_object_come_back_as_they_were_written(server: Server, written: str) -> None:
    """Models stop within an object, and clients send back what they got."""
    messages = [*history(call_arguments=written), {"role": "user", "content": "please say well"}]
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": [WEATHER]})
    assert answer.json["choices"][0]["message"]["content"] == "well"
    assert f'"arguments": {written}}}' in bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": written}
    items = [call, {"type": "function_call_output", "call_id": "c1", "output": "no"}, {"role": "user", "content": "Go"}]
    assert server.post("/v1/responses", {"model": MODEL, "input": items}).status == 200
    assert f'"arguments": {written}}}' in bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()


def test_no_arguments_are_an_empty_object() -> None:
    for written in ("", "  "):
        messages = read({"model": MODEL, "messages": history(call_arguments=written)}).messages
        assert messages is not None
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_the_openai_client_runs_a_function(server: Server) -> None:
    """A round trip: the call is streamed, a real function is called, and its result is sent back."""
    openai = pytest.importorskip("openai")
    seen: list[str] = []

    def weather(city: str) -> str:
        seen.append(city)
        return f"{city}: 21 degrees"

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": f"please say {PARIS}"}]
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
            message = stream.get_final_completion().choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather"
        result = weather(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        messages.append({"role": "user", "content": "please say It is 21 degrees."})
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
        assert answer.choices[0].message.content == "It is 21 degrees."
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        prompt = bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()
        assert "Paris: 21 degrees" in prompt
        with pytest.raises(openai.BadRequestError, match=r"no result"):
            client.chat.completions.create(model=MODEL, messages=messages[:2], tools=[WEATHER])
    assert seen == ["Paris"]


def test_calls_survive_the_death_of_the_gateway(make_server: Callable[..., Server]) -> None:
    """The gateway is killed in the middle of the arguments; the client resumes with the same bytes and ids."""
    server = make_server()
    server.wait_ready()
    peers, body = server.peers, chat(f"I look.\\n{ROME}\\n{PARIS}")
    expected = accumulated(server.stream("/v1/chat/completions", body).all())
    assert len(expected[0]["tool_calls"]) == 2
    stream = server.stream("/v1/chat/completions", body)
    events, begun = stream.events(), []
    while not begun or "tool_calls" not in begun[-1].data["choices"][0]["delta"]:
        begun.append(next(events))
    begun += [next(events) for _ in range(3)]
    peers.do(lambda: setattr(peers, "is_stepping", False))
    peers.do(lambda: setattr(peers, "tokens_per_step", 7))
    server.kill_and_restart()
    stream.close()
    peers.do(peers.kill_scheduler)
    peers.do(peers.start_scheduler)
    peers.do(lambda: setattr(peers, "is_stepping", True))
    path, last = f"/v1/requests/{begun[-1].id.partition(':')[0]}", {"Last-Event-ID": begun[-1].id}
    assert accumulated([*begun, *server.resume(path, last).all()]) == expected
    server.kill_and_restart()
    assert accumulated([*begun, *server.resume(path, last).all()]) == expected


def test_what_clients_add_to_answers_that_they_send_back_has_no_effect() -> None:
    """The official client adds `parsed`, litellm `provider_specific_fields`."""
    body = {"model": MODEL, "messages": history()}
    added = history()
    added[1] |= {"parsed": None, "provider_specific_fields": {"refusal": None}}
    added[1]["tool_calls"][0] |= {"index": 0, "provider_specific_fields": {}}
    added[1]["tool_calls"][0]["function"]["parsed_arguments"] = {}
    assert read({**body, "messages": added}) == read(body)
