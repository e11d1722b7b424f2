"""Tool calls that the real engine generates, and their round trip through the official clients."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Paris, in celsius?"


def weather(city: str, unit: str) -> str:
    assert len(city) <= 20
    return f"21 degrees {unit} in {city}"


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_forced_call_through_the_openai_client(demo_server: Server, temperature: float) -> None:
    """Whole and streamed answers have the same call; its arguments run a function, whose result is answered."""
    function = {"name": "weather", "parameters": SCHEMA, "strict": True}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {
        "model": DEMO_MODEL,
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 300,
        "seed": 5,
        "temperature": temperature,
    }
    with openai.OpenAI(base_url=f"http://127.0.0.1:{demo_server.port}/v1", api_key="none") as client:
        forced = {**options, "tool_choice": "required", "parallel_tool_calls": False}
        choice = client.chat.completions.create(messages=messages, **forced).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        result = weather(**json.loads(call.function.arguments))  # type: ignore[union-attr]
        with client.chat.completions.stream(messages=messages, **forced) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert (streamed.id, streamed.function.arguments) == (call.id, call.function.arguments)  # type: ignore[union-attr]
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        del options["tools"][0]["function"]["strict"]
        answer = client.chat.completions.create(messages=messages, **{**options, "max_tokens": 5}).choices[0]
        assert answer.finish_reason in ("length", "stop", "tool_calls")


def test_a_forced_call_through_the_anthropic_client(demo_server: Server) -> None:
    options: dict[str, Any] = {
        "model": DEMO_MODEL,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "max_tokens": 300,
        "messages": [{"role": "user", "content": QUESTION}],
        "extra_body": {"seed": 5},
    }
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{demo_server.port}", api_key="none") as client:
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            streamed = stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert [block.model_dump() for block in whole.content] == [block.model_dump() for block in streamed.content]
    (block,) = whole.content
    assert block.type == "tool_use"
    weather(**block.input)  # type: ignore[arg-type]
