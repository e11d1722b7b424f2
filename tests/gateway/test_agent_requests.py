"""Requests as a coding agent sends them to /v1/messages, and as chat front ends send them to the OpenAI endpoints.

The bodies and headers have the form of captured ones: everything that these clients send by default is here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import openai
import pytest

from pipeline.api.requests.context_edits import MAX_TURNS, read_context_management, without_old_thinking
from tests.gateway.peers import CONTEXT, MODEL, make_tokenizer
from tests.gateway.server import MakeServer, Server

PATH = "/v1/messages?beta=true"
BETAS = (
    "claude-code-20250219,adaptive-thinking-2026-01-28,context-management-2025-06-27,prompt-caching-scope-2026-01-05,"
    "advanced-tool-use-2025-11-20,effort-2025-11-24,fine-grained-tool-streaming-2025-05-14,not-known-2099-01-01"
)
HEADERS = {
    "Accept": "application/json",
    "Anthropic-Beta": BETAS,
    "Anthropic-Dangerous-Direct-Browser-Access": "true",
    "Anthropic-Version": "2023-06-01",
    "Authorization": "Bearer none",
    "User-Agent": "agent-cli/2.1 (external, cli)",
    "X-App": "cli",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Lang": "js",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Timeout": "600",
}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
TODO = {
    "type": "object",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "properties": {
        "todos": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    "activeForm": {"type": "string"},
                    "blockedBy": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                },
                "required": ["content", "status"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["todos"],
    "additionalProperties": False,
}


def parameter(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": f"The {name}."} for name in names}
    return {"type": "object", "properties": properties, "required": list(names[:1]), "additionalProperties": False}


TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": f"{name}: {'what it does. ' * 4}", "input_schema": parameter(*fields)}
    for name, *fields in (
        ("Bash", "command", "description"),
        ("Read", "file_path", "offset", "limit"),
        ("Write", "file_path", "content"),
        ("Edit", "file_path", "old_string", "new_string"),
        ("Glob", "pattern", "path"),
        ("Grep", "pattern", "glob", "output_mode"),
        ("Task", "prompt", "subagent_type"),
        ("WebFetch", "url", "prompt"),
        ("NotebookEdit", "notebook_path", "new_source"),
        ("mcp__files__list.all", "path"),
        ("ExitPlanMode",),
    )
]
PLAN = {"name": "TodoWrite", "description": "Plans.", "input_schema": TODO, "eager_input_streaming": True}
TOOLS.append({**PLAN, **CACHED})
SYSTEM = [
    {"type": "text", "text": "x-billing-header: version=2.1; entrypoint=cli;"},
    {"type": "text", "text": "You are an agent that writes code.", **CACHED},
    {"type": "text", "text": "Rules.\n" * 40, "cache_control": {"type": "ephemeral"}},
]
BODY: dict[str, Any] = {
    "model": MODEL,
    "system": SYSTEM,
    "tools": TOOLS,
    "metadata": {"user_id": f"user_{'ab' * 32}_account_{'0' * 36}_session_{'1' * 36}"},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
REMINDER = {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>\n"}


def call(name: str, **arguments: Any) -> str:
    """What the model writes to call a tool, in the form of the scripted scheduler."""
    return f"<tool_call>\\n{json.dumps({'name': name, 'arguments': arguments})}\\n</tool_call>"


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [REMINDER, {"type": "text", "text": f"please say {text}", **CACHED}]}


def send(client: anthropic.Anthropic, messages: list[Any], **changes: Any) -> Any:
    """Send a request as the agent does, and return the message of its stream."""
    body = {**BODY, "messages": messages, **changes}
    extra = {name: body.pop(name) for name in ("context_management", "output_config", "temperature") if name in body}
    body.pop("stream")
    options: Any = {"extra_headers": HEADERS, "extra_query": {"beta": "true"}, "extra_body": extra}
    with client.messages.stream(**body, **options) as stream:
        return stream.get_final_message()


@pytest.fixture(scope="module")
def large(homes: Callable[[], Any]) -> Any:
    """A server with room for the agent's tools: each byte of a prompt is a token."""
    running = Server(homes(), tokenizer=partial(make_tokenizer, context_length=30_000))
    running.wait_ready()
    yield running
    assert running.close() == 0


@pytest.fixture
def client(large: Server) -> Any:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{large.port}", auth_token="none", max_retries=0) as made:
        yield made


def prompt(server: Server) -> str:
    return bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()


def test_a_session_of_an_agent(large: Server, client: anthropic.Anthropic) -> None:
    """Probe, count, question, two calls at once, one that fails, a plan, the answer."""
    assert large.request("HEAD", "/").status == 200
    messages: list[Any] = [ask(f"I look.\\n{call('Glob', pattern='*.py')}\\n{call('Bash', command='ls')}")]
    counted = {name: BODY[name] for name in ("model", "system", "tools", "thinking", "context_management")}
    tokens = large.request("POST", "/v1/messages/count_tokens?beta=true", {**counted, "messages": messages}, HEADERS)
    first = send(client, messages)
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    assert tokens.json["input_tokens"] == first.usage.input_tokens + first.usage.cache_read_input_tokens
    glob, bash = first.content[1:]
    assert (glob.input, bash.input) == ({"pattern": "*.py"}, {"command": "ls"})
    found = [{"type": "text", "text": "a.py"}, {"type": "text", "text": "b.py"}]
    results = [
        {"type": "tool_result", "tool_use_id": glob.id, "content": found},
        {
            "type": "tool_result",
            "tool_use_id": bash.id,
            "content": "no such file",
            "is_error": True,
            **CACHED,
        },
    ]
    todos = [{"content": "Read a.py", "status": "pending"}]
    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [*results, {**REMINDER, "text": f"please say {call('TodoWrite', todos=todos)}"}]},
    ]
    second = send(client, messages)
    assert second.content[0].input == {"todos": todos}
    shown = prompt(large)
    assert "a.py\nb.py" in shown
    assert "Error: no such file" in shown
    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in second.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": second.content[0].id},
                {"type": "text", "text": "please say Done."},
            ],
        },
    ]
    last = send(client, messages)
    assert (last.content[0].text, last.stop_reason) == ("Done.", "end_turn")


def test_side_requests_of_an_agent(large: Server, client: anthropic.Anthropic) -> None:
    """A probe of the quota, the title of a session, a summary: small, without tools, some with a prefilled answer."""
    quota = client.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "quota"}])
    assert quota.stop_reason == "max_tokens"
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    title = send(
        client,
        [{"role": "user", "content": 'please say {"title": "Colours"}'}],
        tools=[],
        thinking={"type": "disabled"},
        temperature=1,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(title.content[0].text) == {"title": "Colours"}
    prefilled = [{"role": "user", "content": "A topic?"}, {"role": "assistant", "content": "{"}]
    assert large.post("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": prefilled}).status == 200


def test_an_answer_ends_with_the_context(server: Server) -> None:
    """`max_tokens` of agents is larger than small models' context: the stop reason says what ended the answer."""
    body = {"model": MODEL, "max_tokens": 32_000, "messages": [{"role": "user", "content": "x" * (CONTEXT - 250)}]}
    answer = server.post("/v1/messages", body)
    assert answer.status == 400  # the configured bound of this server
    body["max_tokens"] = 300
    answer = server.post("/v1/messages", {**body, "seed": 3})
    assert answer.status == 200
    submitted = server.peers.generator.submitted[-1]
    assert submitted.max_tokens == CONTEXT - len(submitted.prompt) // 4 < 300
    ended = answer.json["usage"]["output_tokens"] == submitted.max_tokens
    assert answer.json["stop_reason"] == ("model_context_window_exceeded" if ended else "end_turn")
    assert server.post("/v1/messages", {**body, "max_tokens": 1}).json["stop_reason"] == "max_tokens"


def test_which_reasoning_is_kept() -> None:
    def read(keep: Any) -> int:
        edit = {"type": "clear_thinking_20251015", **({"keep": keep} if keep is not None else {})}
        return read_context_management({"edits": [edit]}, "context_management")

    assert (read("all"), read({"type": "all"}), read(None)) == (MAX_TURNS, MAX_TURNS, 1)
    assert read_context_management({}, "context_management") == MAX_TURNS
    assert read({"type": "thinking_turns", "value": 2}) == 2
    answers = [{"role": "assistant", "content": "b", "reasoning_content": str(n)} for n in range(3)]
    messages = [answers[0], {"role": "user", "content": "a"}, *answers[1:]]
    for kept, expected in ((MAX_TURNS, ["0", "1", "2"]), (2, ["1", "2"]), (1, ["2"])):
        shown = without_old_thinking(messages, kept)
        assert [message["content"] for message in shown] == ["b", "a", "b", "b"]
        assert [message["reasoning_content"] for message in shown if "reasoning_content" in message] == expected


def test_effort_is_the_level_of_a_template_that_has_levels(make_server: MakeServer) -> None:
    tokenizer = partial(make_tokenizer, reasoning=("<think>", "</think>"), thinking_switches=("reasoning_effort",))
    running = make_server(tokenizer=tokenizer)
    running.wait_ready()
    body = {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": "{arguments}"}]}
    enabled = {"type": "enabled", "budget_tokens": 1024}
    for more, level in (
        ({}, None),
        ({"output_config": {"effort": "max"}}, "max"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "low"),
        ({"output_config": {"effort": "high"}, "thinking": enabled}, "high"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "none"),
    ):
        assert running.post("/v1/messages", {**body, **more}).status == 200
        variables = json.loads(prompt(running).split("\n")[0].removeprefix("user: "))[3]
        assert variables.get("reasoning_effort") == level, more


def test_a_chat_front_end(server: Server) -> None:
    """Models, a streamed chat with usage, and the title, tags, follow-ups and search queries that it asks for."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        assert [model.id for model in made.models.list()] == [MODEL]
        history = [
            {"role": "system", "content": "User Context:\n\nToday is Monday."},
            {"role": "user", "content": [{"type": "text", "text": "please say Hello **you**."}]},
        ]
        events = list(
            made.chat.completions.create(
                model=MODEL,
                messages=history,  # type: ignore[arg-type]
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"top_k": 40, "min_p": 0.05, "repeat_penalty": 1.0, "cache_prompt": True, "logit_bias": {}},
            )
        )
        assert "".join(c.delta.content or "" for e in events for c in e.choices) == "Hello **you**."
        assert events[-1].usage is not None
        tasks = {"title": '{"title": "Greeting"}', "tags": '{"tags": ["a"]}', "queries": '{"queries": []}'}
        for task, say in tasks.items():
            prompted = f"### Task:\nGenerate {task}.\n### Output:\nJSON\n<chat_history>\nplease say {say}"
            for bound in ({"max_tokens": 100}, {"max_completion_tokens": 100}):
                asked: Any = {"messages": [{"role": "user", "content": prompted}], "temperature": 0.1, **bound}
                answer = made.chat.completions.create(model=MODEL, stream=False, **asked)
                assert answer.choices[0].message.content == say
