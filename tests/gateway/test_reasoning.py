"""Models that think: reasoning apart from the answer in every API, switched on and off, resumed in its middle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stages.tokenizer.chat_messages import RenderedChat
from tests.gateway import response_bodies, test_messages, test_responses
from tests.gateway.http_client import Event
from tests.gateway.peers import MODEL, JoiningTemplate, make_tokenizer
from tests.gateway.server import Server

MARKS = ("<think>", "</think>")
SWITCH = ("enable_thinking",)
THOUGHT = "<think>\\nA ä\\nB\\n</think>\\n\\n"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


class ThinkingTemplate(JoiningTemplate):
    """Begins reasoning in the prompt where it is switched on, and ends it there where it is switched off."""

    def render(self, messages: list[dict], generate: bool, tools: Any, variables: dict, *rest: Any, **more: Any) -> Any:
        shown = [
            {**message, "content": f"({message['reasoning_content']}){message['content']}"}
            if "reasoning_content" in message
            else message
            for message in messages
        ]
        text = super().render(shown, generate, tools, variables, *rest, **more).text
        ends = {True: "<think>\n", False: "<think>\n\n</think>\n\n"}
        return RenderedChat(text + ends.get(variables.get("enable_thinking", ""), ""), frozenset())


@pytest.fixture(scope="module")
def thinker(homes: Callable[[], Path]) -> Iterator[Server]:
    """A server whose model thinks."""
    tokenizer = partial(make_tokenizer, ThinkingTemplate(), reasoning=MARKS, thinking_switches=SWITCH)
    running = Server(homes(), tokenizer=tokenizer)
    running.wait_ready()
    yield running
    assert running.close() == 0


def chat(say: str, **more: Any) -> dict[str, Any]:
    """A chat whose answer is `say`."""
    return {"model": MODEL, "messages": [{"role": "user", "content": f"please say {say}"}], "seed": 1, **more}


def prompt(server: Server) -> str:
    """The prompt of the last request."""
    return bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()


def accumulated(events: list[Event]) -> list[dict[str, Any]]:
    """The messages that a client makes of the events of a stream."""
    messages: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in event.data["choices"]:
            message = messages.setdefault(
                choice["index"], {"reasoning": "", "content": "", "calls": "", "finish": None}
            )
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["reasoning"] += delta.get("reasoning_content", "")
            message["content"] += delta.get("content") or ""
            message["calls"] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", []))
            message["finish"] = choice["finish_reason"] or message["finish"]
    return [messages[index] for index in sorted(messages)]


def whole(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a whole answer in the form of `accumulated`."""
    return [
        {
            "reasoning": choice["message"].get("reasoning_content", ""),
            "content": choice["message"]["content"] or "",
            "calls": "".join(call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])),
            "finish": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


ON, OFF = {"reasoning_effort": "high"}, {"reasoning_effort": "none"}
CASES: list[tuple[str, dict[str, Any], tuple[str, str, str, str], int]] = [
    (f"{THOUGHT}Hi </think>", {}, ("A ä\nB", "Hi </think>", "", "stop"), 23),
    ("Hi <think>", {}, ("", "Hi <think>", "", "stop"), 0),
    ("<think>\\n\\n</think>\\n\\nHi", {}, ("", "Hi", "", "stop"), 17),
    ("A\\n</think>\\nHi", ON, ("A", "Hi", "", "stop"), 10),
    ("Hi", OFF, ("", "Hi", "", "stop"), 0),
    (f"{THOUGHT}Hi", {"n": 2}, ("A ä\nB", "Hi", "", "stop"), 46),
    (f"{THOUGHT}Hi", {"max_tokens": 12}, ("A ä", "", "", "length"), 12),
    (f"{THOUGHT}Hi B!", {"stop": ["B", "\n"]}, ("A ä\nB", "Hi ", "", "stop"), 23),
    (f"{THOUGHT}Look. {CALL}", {"tools": [WEATHER]}, ("A ä\nB", "Look.", '{"city": "Rome"}', "tool_calls"), 23),
    (f"<think>{CALL}</think>Hi", {"tools": [WEATHER]}, (CALL, "Hi", "", "stop"), 15 + len(CALL)),
    (f"{THOUGHT}Hi", {"include_reasoning": False}, ("", "Hi", "", "stop"), 23),
    (f"{THOUGHT}Hi", {"logprobs": True}, ("A ä\nB", "Hi", "", "stop"), 23),
]


@pytest.mark.parametrize(("say", "more", "expected", "n_reasoning"), CASES)
def test_reasoning_is_apart_from_the_answer(
    thinker: Server, say: str, more: dict[str, Any], expected: tuple[str, str, str, str], n_reasoning: int
) -> None:
    body = chat(say, **more)
    answer = thinker.post(CHAT, body).json
    messages = [dict(zip(("reasoning", "content", "calls", "finish"), expected))] * more.get("n", 1)
    assert whole(answer) == messages
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": n_reasoning}
    assert all(choice["message"].get("reasoning") == (expected[0] or None) for choice in answer["choices"])
    events = thinker.stream(CHAT, {**body, "stream_options": {"include_usage": True}}).all()
    assert accumulated(events) == messages
    assert events[-2].data["usage"]["completion_tokens_details"] == {"reasoning_tokens": n_reasoning}


LONG = "<think>\\n" + "Hm, ä. " * 40 + "</think>\\n\\nYes."
ENDED = "\n\nIn short: ä."


@pytest.mark.parametrize("field", ["thinking_token_budget", "reasoning_budget_tokens"])
@pytest.mark.parametrize("budget", [1, 7, 9, 15, 16, 100])
def test_reasoning_ends_at_its_budget(thinker: Server, field: str, budget: int) -> None:
    """The mark is forced behind the token that reaches the budget, or that ends the character or mark there."""
    body = chat(LONG, n=2, logprobs=True, top_logprobs=2, **{field: budget})
    answer = thinker.post(CHAT, body).json
    whole_text = LONG.replace("\\n", "\n")
    at = max(budget, 7)  # the first mark is as long
    while True:
        try:
            kept = whole_text.encode()[:at].decode()
            break
        except UnicodeDecodeError:
            at += 1
    expected = {
        "reasoning": kept.removeprefix("<think>").strip(),
        "content": ENDED.strip(),
        "calls": "",
        "finish": "stop",
    }
    assert whole(answer) == [expected] * 2
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * (at + 8)}
    assert answer["usage"]["completion_tokens"] == 2 * (at + 8 + len(ENDED.encode()) + 1)
    logprobs = answer["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in logprobs[at - 1 : at + 9]] == [-0.5, *[0.0] * 8, -0.5]
    assert [one["token"] for one in logprobs[at : at + 8]] == list("</think>")
    assert len(logprobs[at]["top_logprobs"]) == 1
    assert accumulated(thinker.stream(CHAT, body).all()) == [expected] * 2


def test_a_budget_that_is_not_reached_changes_nothing(thinker: Server) -> None:
    for say in (LONG, "Hi", f"{THOUGHT}Hi"):
        body = chat(say, max_tokens=400)
        assert whole(thinker.post(CHAT, {**body, "thinking_token_budget": 399}).json) == whole(
            thinker.post(CHAT, body).json
        )
    cut = thinker.post(CHAT, chat(LONG, max_tokens=20, thinking_token_budget=20)).json
    assert (whole(cut)[0]["finish"], whole(cut)[0]["content"]) == ("length", "")
    cut = thinker.post(CHAT, chat(LONG, max_tokens=24, thinking_token_budget=20)).json
    assert whole(cut)[0]["reasoning"].endswith("</th")


def test_the_budget_of_a_message(thinker: Server) -> None:
    long = "<think>" + "Hm. " * 400 + "</think>Yes."
    body = {**chat(long), "max_tokens": 2000, "thinking": enabled(1024)}
    # The template begins the reasoning in the prompt: the mark that the model writes is a part of it.
    answer = thinker.post(MESSAGES, body).json
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert len(answer["content"][0]["thinking"]) in (1023, 1024)
    assert answer["content"][1]["text"] == ENDED.strip()


def test_a_stream_whose_reasoning_was_ended_can_be_resumed_after_each_event(thinker: Server) -> None:
    events = thinker.stream(CHAT, chat(LONG, thinking_token_budget=15)).all()
    message = accumulated(events)
    assert message[0]["content"] == ENDED.strip()
    for received, event in enumerate(events[:-1], 1):
        rest = thinker.resume(f"/v1/requests/{event.id.partition(':')[0]}", {"Last-Event-ID": event.id}).all()
        assert accumulated([*events[:received], *rest]) == message


def test_reasoning_can_stay_in_the_text(thinker: Server) -> None:
    answer = thinker.post(CHAT, chat(f"{THOUGHT}Hi", reasoning_format="none")).json
    assert answer["choices"][0]["message"]["content"] == "<think>\nA ä\nB\n</think>\n\nHi"
    assert "completion_tokens_details" not in answer["usage"]
    plain = {"model": MODEL, "prompt": f"please say {THOUGHT}Hi", "max_tokens": 100}
    assert thinker.post("/v1/completions", plain).json["choices"][0]["text"] == "<think>\nA ä\nB\n</think>\n\nHi"


def test_a_stream_can_be_resumed_after_each_event(thinker: Server) -> None:
    events = thinker.stream(CHAT, chat(f"{THOUGHT}Hi {CALL}", tools=[WEATHER])).all()
    message = accumulated(events)
    assert message[0]["reasoning"] == "A ä\nB"
    for received, event in enumerate(events[:-1], 1):
        rest = thinker.resume(f"/v1/requests/{event.id.partition(':')[0]}", {"Last-Event-ID": event.id}).all()
        assert accumulated([*events[:received], *rest]) == message


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"reasoning_effort": "low"}, "<think>\n"),
        ({"reasoning_effort": "minimal"}, "</think>\n\n"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n"),
        ({}, "please say x\n"),
    ],
)
def test_the_effort_switches_the_template(thinker: Server, more: dict[str, Any], end: str) -> None:
    assert thinker.post(CHAT, chat("x", **more)).status == 200
    assert prompt(thinker).endswith(end)


def enabled(budget: int) -> dict[str, Any]:
    return {"type": "enabled", "budget_tokens": budget}


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"reasoning_effort": "much"}, "reasoning_effort", '"none"'),
    (
        CHAT,
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        "reasoning_effort",
        "says otherwise",
    ),
    (CHAT, {"reasoning_format": "raw"}, "reasoning_format", '"deepseek"'),
    (CHAT, {"thinking_token_budget": 0}, "thinking_token_budget", "switches reasoning off"),
    (CHAT, {"thinking_token_budget": 5, "reasoning_budget_tokens": 6}, "thinking_token_budget", "differ"),
    (CHAT, {"thinking_token_budget": 5, "reasoning_format": "none"}, "thinking_token_budget", "leave one"),
    (MESSAGES, {"max_tokens": 2000, "thinking": {"type": "on"}}, "thinking.type", '"enabled"'),
    (
        MESSAGES,
        {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 9}},
        "thinking.budget_tokens",
        "1024",
    ),
    (
        MESSAGES,
        {"max_tokens": 1024, "thinking": enabled(1024)},
        "thinking.budget_tokens",
        "lower",
    ),
    (
        MESSAGES,
        {"max_tokens": 2000, "thinking": {"type": "disabled", "budget_tokens": 1024}},
        "thinking.budget_tokens",
        "leave it out",
    ),
]


@pytest.mark.parametrize(("path", "change", "param", "message"), REFUSED)
def test_refused(thinker: Server, path: str, change: dict[str, Any], param: str, message: str) -> None:
    answer = thinker.post(path, {**chat("x"), **change})
    assert answer.status == 400
    assert param in answer.json["error"]["message"]
    assert message in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "change", "expected"),
    [
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort asks for reasoning"),
        (CHAT, {"reasoning_effort": "none"}, ""),
        (MESSAGES, {"max_tokens": 2000, "thinking": enabled(1024)}, "thinking.type asks"),
        (MESSAGES, {"max_tokens": 9, "thinking": {"type": "disabled"}}, ""),
        (MESSAGES, {"max_tokens": 9, "thinking": {"type": "adaptive"}}, ""),
    ],
)
def test_a_model_without_reasoning(server: Server, path: str, change: dict[str, Any], expected: str) -> None:
    answer = server.post(path, {**chat("<think>a</think>b"), **change})
    assert answer.status == (400 if expected else 200)
    assert expected in answer.json.get("error", {}).get("message", "")
    if path == CHAT and not expected:
        assert answer.json["choices"][0]["message"]["content"] == "<think>a</think>b"


def test_a_constraint_begins_after_the_reasoning(thinker: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    before = [(ON, True), ({}, False), (OFF, None)]
    for more, is_open in before:
        say = "a</think> {}" if is_open else "{}" if is_open is None else "<think>a</think> {}"
        answer = thinker.post(CHAT, chat(say, response_format=form, **more)).json["choices"][0]["message"]
        assert answer["content"] == ("{}" if is_open is None else " {}")
        after = thinker.peers.generator.submitted[-1].constraint.after
        assert (after.is_open if after is not None else None) is is_open
        assert after is None or (after.begin, after.end, after.begin_id, after.end_id) == (*MARKS, -1, -1)
    forced = thinker.post(CHAT, chat(f"a</think>{CALL}", tools=[WEATHER], tool_choice="required", **ON)).json
    assert whole(forced)[0]["calls"] == '{"city": "Rome"}'
    assert thinker.peers.generator.submitted[-1].constraint.after.is_open


def test_reasoning_of_earlier_answers_goes_to_the_template(thinker: Server) -> None:
    chats = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "thus"},
        {"role": "user", "content": "z"},
    ]
    items = [
        chats[0],
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "thus"}]},
        {"role": "assistant", "content": "y"},
        chats[2],
    ]
    blocks = [{"type": "thinking", "thinking": "thus", "signature": "s"}, {"type": "text", "text": "y"}]
    for path, more in (
        (CHAT, {"messages": chats}),
        (CHAT, {"messages": [chats[0], {"role": "assistant", "content": "y", "reasoning": "thus"}, chats[2]]}),
        (RESPONSES, {"input": items}),
        (MESSAGES, {"messages": [chats[0], {"role": "assistant", "content": blocks}, chats[2]], "max_tokens": 5}),
    ):
        assert thinker.post(path, {"model": MODEL, **more}).status == 200
        assert prompt(thinker) == "user: x\nassistant: (thus)y\nuser: z\n"


def test_a_continued_message_may_be_reasoning(thinker: Server) -> None:
    for prefill, say, expected in (
        ("<think>so", " far</think>Hi", ("far", "Hi")),
        ("<think>so</think>I say: ", "Hi", ("", "Hi")),
    ):
        messages = [*chat(say)["messages"], {"role": "assistant", "content": prefill}]
        body = {**chat(say), "messages": messages, "add_generation_prompt": False, "continue_final_message": True}
        (message,) = whole(thinker.post(CHAT, body).json)
        assert (message["reasoning"], message["content"]) == expected


def test_a_schema_is_refused_behind_an_answer_and_not_behind_reasoning(thinker: Server) -> None:
    for prefill, status in (("<think>so", 200), ("<think>so</think>\n", 200), ("<think>so</think>{", 400), ("{", 400)):
        messages = [*chat("{}")["messages"], {"role": "assistant", "content": prefill}]
        body = {**chat("{}"), "messages": messages, "add_generation_prompt": False, "continue_final_message": True}
        answer = thinker.post(CHAT, {**body, "response_format": {"type": "json_object"}})
        assert answer.status == status
        if status == 400:
            assert answer.error["param"] == "response_format"
        assert thinker.post(CHAT, {**body, "regex": "x+"}).status == 200


def test_blocks_of_messages(thinker: Server) -> None:
    body = {**chat(f"{THOUGHT}Hi"), "max_tokens": 2000, "thinking": enabled(1024)}
    body["messages"][0]["content"] = "please say A ä\\nB</think>\\n\\nHi"
    answer = thinker.post(MESSAGES, body).json
    thinking, text = answer["content"]
    assert (thinking["type"], thinking["thinking"], text) == ("thinking", "A ä\nB", {"type": "text", "text": "Hi"})
    events = test_messages.read_events(thinker, MESSAGES, body)
    names = [event.data.get("delta", event.data.get("content_block", {})).get("type") for event in events]
    starts = [name for name in dict.fromkeys(names) if name]
    assert starts == ["thinking", "thinking_delta", "signature_delta", "text", "text_delta"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event.name == "content_block_start":
            blocks.append(dict(event.data["content_block"]))
        elif event.name == "content_block_delta":
            delta = {key: value for key, value in event.data["delta"].items() if key != "type"}
            blocks[-1] |= {key: blocks[-1][key] + value for key, value in delta.items()}
    assert blocks == answer["content"]
    for received, event in enumerate(events[:-1], 1):
        path = f"/v1/requests/{event.id.partition(':')[0]}"
        rest = test_messages.read_events(thinker, path, None, {"Last-Event-ID": event.id})
        assert joined(events[:received] + rest) == joined(events)
    adaptive = {**chat(f"{THOUGHT}Hi"), "max_tokens": 2000, "thinking": {"type": "adaptive"}}
    for asked in (body, adaptive):
        for display, kinds in (("summarized", ["thinking", "text"]), ("omitted", ["text"]), ("full", [])):
            shown = thinker.post(MESSAGES, {**asked, "thinking": {**asked["thinking"], "display": display}})
            assert shown.status == (200 if kinds else 400)
            assert [block["type"] for block in shown.json.get("content", [])] == kinds
    off = {**body, "thinking": {"type": "disabled"}, "messages": chat("Hi")["messages"]}
    assert thinker.post(MESSAGES, off).json["content"] == [{"type": "text", "text": "Hi"}]
    assert prompt(thinker).endswith("</think>\n\n")
    count = {key: off[key] for key in ("model", "messages", "thinking")}
    n_tokens = thinker.post("/v1/messages/count_tokens", count).json["input_tokens"]
    assert n_tokens == len(thinker.peers.generator.submitted[-1].prompt) // 4


def joined(events: list[Any]) -> str:
    """The events without their ids, with neighbouring deltas of one kind joined."""
    made: list[Any] = []
    for event in events:
        delta = event.data.get("delta", {})
        if event.name == "content_block_delta" and made and made[-1][0] == (event.name, delta["type"]):
            made[-1][1].append(delta)
        else:
            made.append([(event.name, delta.get("type") if isinstance(delta, dict) else ""), [event.data]])
            if event.name == "content_block_delta":
                made[-1][1] = [delta]
    for kind, parts in made:
        if kind[0] == "content_block_delta":
            field = next(key for key in parts[0] if key != "type")
            parts[:] = ["".join(part[field] for part in parts)]
    return json.dumps([part for part in made if part[0][0] not in ("message_start",)])


def test_items_of_responses(thinker: Server) -> None:
    body = {"model": MODEL, "input": f"please say {THOUGHT}Hi", "seed": 1}
    answer = thinker.post(RESPONSES, body).json
    reasoning, message = answer["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "A ä\nB"}]
    assert message["content"][0]["text"] == "Hi"
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 23}
    events = test_responses.read_events(thinker, RESPONSES, body)
    names = list(dict.fromkeys(event.name for event in events))
    assert names[2:7] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
    ]
    deltas = [event.data["delta"] for event in events if event.name == "response.reasoning_text.delta"]
    assert "".join(deltas) == "A ä\nB"
    done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
    assert done == events[-1].data["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message"]
    for received, event in enumerate(events[:-1], 1):
        if not event.id:
            continue
        path = f"/v1/requests/{event.id.partition(':')[0]}"
        headers = {"Last-Event-ID": event.id}
        answer_ = thinker.request("GET", path, None, headers)
        rest = response_bodies.parse_events(answer_.body)
        both = [*events[:received], *rest]
        assert "".join(e.data["delta"] for e in both if e.name.endswith("reasoning_text.delta")) == "A ä\nB"
        assert [e.data["sequence_number"] for e in rest] == sorted(e.data["sequence_number"] for e in rest)
        assert both[-1].data["response"] == events[-1].data["response"]
    more = {"model": MODEL, "input": "and?", "previous_response_id": answer["id"], "reasoning": {"effort": "none"}}
    second = thinker.post(RESPONSES, more).json
    assert second["reasoning"]["effort"] == "none"
    assert "assistant: (A ä\nB)Hi\nuser: and?\n" in prompt(thinker)
    cut = thinker.post(RESPONSES, {**body, "max_output_tokens": 12}).json
    assert [(item["type"], item["status"]) for item in cut["output"]] == [("reasoning", "incomplete")]


def test_the_official_clients(thinker: Server) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    base = f"http://127.0.0.1:{thinker.port}"
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        message = client.chat.completions.create(**chat(f"{THOUGHT}Hi")).choices[0].message
        assert (message.reasoning_content, message.content) == ("A ä\nB", "Hi")
        with client.responses.stream(model=MODEL, input=f"please say {THOUGHT}Hi") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert "response.reasoning_text.delta" in kinds
        assert (final.output[0].content[0].text, final.output_text) == ("A ä\nB", "Hi")
        again = client.responses.create(
            model=MODEL,
            input=[*(item.model_dump(exclude_none=True) for item in final.output), chat("so")["messages"][0]],
        )
        assert again.output_text == "so"
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        body = {"model": MODEL, "max_tokens": 2000, "thinking": enabled(1024)}
        messages = [{"role": "user", "content": "please say A ä</think>Hi"}]
        with client.messages.stream(messages=messages, **body) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].signature
        turns = [*messages, {"role": "assistant", "content": final.content}, {"role": "user", "content": "so?"}]
        client.messages.create(messages=turns, **body)
        assert "(A ä)Hi" in prompt(thinker)


def test_reasoning_survives_the_death_of_the_gateway(homes: Callable[[], Path]) -> None:
    """The gateway is killed in the middle of the reasoning; the client resumes with the same bytes."""
    tokenizer = partial(make_tokenizer, ThinkingTemplate(), reasoning=MARKS, thinking_switches=SWITCH)
    server = Server(homes(), tokenizer=tokenizer)
    try:
        server.wait_ready()
        peers, body = server.peers, chat("A long ä thought.\\n</think>\\nHi long. there", stop=["lon"], **ON)
        expected = accumulated(server.stream(CHAT, body).all())
        assert expected == [{"reasoning": "A long ä thought.", "content": "Hi ", "calls": "", "finish": "stop"}]
        stream = server.stream(CHAT, body)
        begun: list[Event] = []
        for event in stream.events():
            begun.append(event)
            if "reasoning" in event.data["choices"][0]["delta"]:
                peers.do(lambda: setattr(peers, "is_stepping", False))
                break
        server.kill_and_restart()
        stream.close()
        peers.do(peers.kill_scheduler)
        peers.do(peers.start_scheduler)
        peers.do(lambda: setattr(peers, "is_stepping", True))
        last = begun[-1].id
        rest = server.resume(f"/v1/requests/{last.partition(':')[0]}", {"Last-Event-ID": last}).all()
        assert accumulated([*begun, *rest]) == expected
    finally:
        server.close()
