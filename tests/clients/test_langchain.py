"""langchain-openai and langchain-anthropic."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import Field


@tool
def add(a: int = Field(ge=0, le=99), b: int = Field(ge=0, le=99)) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request: pytest.FixtureRequest, target: Any) -> Any:
    options = {"model": target.model, "api_key": target.key, "max_tokens": 200, "temperature": 0, "max_retries": 0}
    if request.param == "anthropic":
        return ChatAnthropic(base_url=target.root, **options)
    return ChatOpenAI(base_url=target.v1, use_responses_api=request.param == "responses", **options)


def test_chat_is_the_same_streamed(model: Any) -> None:
    model.max_tokens = 20
    whole = model.invoke("Name three colours.")
    pieces = list(model.stream("Name three colours."))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.usage_metadata["output_tokens"] == 20


def test_a_tool_call_and_its_result(model: Any) -> None:
    question = HumanMessage("What is 2 + 3?")
    forced = model.bind_tools([add], tool_choice="add")
    answer = forced.invoke([question])
    streamed = None
    for piece in forced.stream([question]):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    (call,) = answer.tool_calls
    (streamed_call,) = streamed.tool_calls
    assert call["args"] == streamed_call["args"]
    result = add.invoke(call)
    assert isinstance(result, ToolMessage)
    model.max_tokens = 10
    assert model.bind_tools([add]).invoke([question, answer, result]).response_metadata


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_pydantic_model_as_output(model: Any, person: Any, method: str) -> None:
    found = model.with_structured_output(person, method=method).invoke("Invent a person.")
    assert isinstance(found, person)


def test_text_and_embeddings(target: Any) -> None:
    options = {"base_url": target.v1, "api_key": target.key, "model": target.model}
    assert OpenAI(max_tokens=5, **options).invoke("The sky is")
    # By default it sends token ids of OpenAI's vocabulary.
    vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
    assert len(vectors.embed_query("a lighthouse")) > 100
    assert len(vectors.embed_documents(["a", "b"])) == 2


def test_errors_have_their_classes(target: Any) -> None:
    options = {"api_key": target.key, "max_retries": 0, "max_tokens": 5}
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(base_url=target.v1, model="none", **options).invoke("Hi")
    with pytest.raises(anthropic.NotFoundError):
        ChatAnthropic(base_url=target.root, model="none", **options).invoke("Hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ChatOpenAI(base_url=target.v1, model=target.model, temperature=3, **options).invoke("Hi")
