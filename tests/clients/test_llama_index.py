"""llama-index: OpenAILike and OpenAILikeEmbedding."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def make_model(target: Any, **more: Any) -> OpenAILike:
    options = {"max_tokens": 200, "temperature": 0.0, "max_retries": 0, "context_window": 2048, **more}
    return OpenAILike(
        **{"model": target.model, "api_base": target.v1, "api_key": target.key, "is_chat_model": True, **options},
        is_function_calling_model=True,
    )


@pytest.mark.parametrize("is_chat", [True, False])
def test_text_is_the_same_streamed(target: Any, is_chat: bool) -> None:
    model = make_model(target, max_tokens=15, is_chat_model=is_chat)
    whole = model.complete("Name three colours.").text
    assert whole
    assert "".join(piece.delta or "" for piece in model.stream_complete("Name three colours.")) == whole
    if is_chat:
        question = [ChatMessage(role="user", content="Name three colours.")]
        answer = model.chat(question).message.content
        assert "".join(piece.delta or "" for piece in model.stream_chat(question)) == answer


def test_a_tool_is_called_and_its_result_sent(target: Any) -> None:
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    model = make_model(target)
    function = FunctionTool.from_defaults(double)
    question = [ChatMessage(role="user", content="Double 4.")]
    answer = model.chat_with_tools([function], chat_history=question, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert {call.tool_name for call in calls} == {"double"}
    results = [
        ChatMessage(
            role="tool",
            content=str(function.call(**call.tool_kwargs).raw_output),
            additional_kwargs={"tool_call_id": call.tool_id},
        )
        for call in calls
    ]
    last = make_model(target, max_tokens=10).chat_with_tools(
        [function], chat_history=[*question, answer.message, *results]
    )
    assert last.raw is not None


@pytest.mark.parametrize("by_schema", [True, False])
def test_a_pydantic_model_as_output(target: Any, person: Any, by_schema: bool) -> None:
    model = make_model(target, should_use_structured_outputs=by_schema)
    found = model.as_structured_llm(person).complete("Invent a person.").raw
    assert isinstance(found, person)


def test_embeddings(target: Any) -> None:
    model = OpenAILikeEmbedding(model_name=target.model, api_base=target.v1, api_key=target.key)
    assert len(model.get_text_embedding("a lighthouse")) > 100
    assert len(model.get_text_embedding_batch(["a", "b", "c"])) == 3


def test_errors_have_their_classes(target: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        make_model(target, model="none").complete("Hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        make_model(target, temperature=2.0, additional_kwargs={"temperature": 3}).complete("Hi")
