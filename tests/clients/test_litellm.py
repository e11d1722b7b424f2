"""litellm: OpenAI's format and Anthropic's, through one interface."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(params=["openai", "anthropic"])
def options(request: pytest.FixtureRequest, target: Any) -> dict[str, Any]:
    base = target.v1 if request.param == "openai" else target.root
    return {"model": f"{request.param}/{target.model}", "api_base": base, "api_key": target.key, "max_tokens": 200}


def test_chat_is_the_same_streamed(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, **{**options, "max_tokens": 20, "temperature": 0})
    pieces = list(litellm.completion(messages=QUESTION, stream=True, **{**options, "max_tokens": 20, "temperature": 0}))
    assert whole.usage.completion_tokens == 20
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_and_its_result(options: dict[str, Any], stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = litellm.completion(messages=QUESTION, tools=[WEATHER], tool_choice=choice, stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=QUESTION)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = litellm.completion(messages=[*QUESTION, message, result], tools=[WEATHER], **{**options, "max_tokens": 10})
    assert last.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_pydantic_model_as_response_format(target: Any, person: Any) -> None:
    answer = litellm.completion(
        model=f"openai/{target.model}",
        api_base=target.v1,
        api_key=target.key,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=person,
        max_tokens=200,
    )
    person.model_validate_json(answer.choices[0].message.content)


def test_responses_text_completion_and_embeddings(target: Any) -> None:
    options = {"api_base": target.v1, "api_key": target.key}
    response = litellm.responses(model=f"openai/{target.model}", input="Say hello.", max_output_tokens=8, **options)
    assert response.status in ("completed", "incomplete")
    text = litellm.text_completion(
        model=f"text-completion-openai/{target.model}", prompt="The sky is", max_tokens=5, **options
    )
    assert text.choices[0].text
    vectors = litellm.embedding(model=f"openai/{target.model}", input=["a", "b"], **options)
    assert len(vectors.data) == 2
    assert len(vectors.data[0]["embedding"]) > 100


def test_errors_have_their_classes(target: Any) -> None:
    options = {"api_base": target.v1, "messages": QUESTION, "max_tokens": 5, "num_retries": 0}
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model=f"openai/{target.model}", api_key=target.key, temperature=3, **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/none", api_key=target.key, **options)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model=f"openai/{target.model}", api_key="wrong", **options)
    long = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=f"openai/{target.model}", api_key=target.key, **{**options, "messages": long})
