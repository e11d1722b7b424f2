"""Pydantic models out of the official clients' `parse`, which the real engine's answers always fit."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

QUESTION: list[Any] = [{"role": "user", "content": "Invent a person."}]


class Person(BaseModel):
    """Bounded, so that every answer is complete."""

    name: str = Field(min_length=1, max_length=10)
    age: int = Field(ge=0, le=120)
    colour: Literal["red", "green"]


def test_a_chat_and_a_response_are_parsed(demo_server: Server) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{demo_server.port}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": DEMO_MODEL, "temperature": 1}
        chat = client.chat.completions.parse(messages=QUESTION, response_format=Person, max_tokens=200, **options)
        assert isinstance(chat.choices[0].message.parsed, Person)
        answer = client.responses.parse(input=QUESTION, text_format=Person, max_output_tokens=200, **options)
        assert isinstance(answer.output_parsed, Person)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(messages=QUESTION, response_format=Person, max_tokens=2, **options)


class Choice(BaseModel):
    """Without bounds of numbers and lengths, which the client `anthropic` leaves out of the schema that it sends."""

    colour: Literal["red", "green"]
    is_member: bool


def test_a_message_is_parsed(demo_server: Server) -> None:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{demo_server.port}", api_key="none", max_retries=0) as client:
        found = client.messages.parse(model=DEMO_MODEL, messages=QUESTION, output_format=Choice, max_tokens=200)
        assert isinstance(found.parsed_output, Choice)
