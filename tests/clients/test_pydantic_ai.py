"""pydantic-ai: agents with tools and typed outputs, over chat completions and responses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    NativeOutput,
    ToolOutput,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


@pytest.fixture(params=["chat", "responses"])
def model(request: pytest.FixtureRequest, target: Any) -> Any:
    openai = OpenAIProvider(base_url=target.v1, api_key=target.key)
    return (OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel)(target.model, provider=openai)


async def test_chat_is_the_same_streamed(model: Any) -> None:
    agent = Agent(model, model_settings={"max_tokens": 20, "temperature": 0}, instructions="Be brief.")
    whole = await agent.run("Name three colours.")
    async with agent.run_stream("Name three colours.") as stream:
        streamed = await stream.get_output()
    assert streamed == whole.output
    follow_up = await agent.run("And two more?", message_history=whole.all_messages())
    assert 0 < follow_up.usage.output_tokens <= 20


async def test_a_typed_output_by_a_forced_tool(model: Any, person: Any) -> None:
    agent = Agent(model, output_type=ToolOutput(person), model_settings={"max_tokens": 400, "temperature": 0})
    assert isinstance((await agent.run("Invent a person.")).output, person)


async def test_a_typed_output_by_a_schema(model: Any, person: Any) -> None:
    agent = Agent(model, output_type=NativeOutput(person), model_settings={"max_tokens": 300})
    assert isinstance((await agent.run("Invent a person.")).output, person)


async def test_an_agent_calls_its_tool(model: Any, person: Any) -> None:
    """The demo model calls no tool of its own accord: each answer is a call, of the tool or of the output."""
    agent = Agent(model, output_type=ToolOutput(person), model_settings={"max_tokens": 150, "temperature": 1.0})
    called: list[int] = []

    @agent.tool_plain
    def dice(sides: int) -> int:
        """Roll a die."""
        called.append(sides)
        return 4

    for _ in range(20):
        with contextlib.suppress(UsageLimitExceeded, UnexpectedModelBehavior):
            await agent.run("Roll a die.", usage_limits=UsageLimits(request_limit=2))
        if called:
            return
    pytest.fail("no answer of twenty called the tool")


async def test_errors_have_their_class(target: Any) -> None:
    model = OpenAIChatModel("none", provider=OpenAIProvider(base_url=target.v1, api_key=target.key))
    with pytest.raises(ModelHTTPError) as failed:
        await Agent(model).run("Hi")
    assert failed.value.status_code == 404
