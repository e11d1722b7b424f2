"""instructor: Pydantic models out of every mode that the server can enforce, with both official clients."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "Invent a person."}]
MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_through_the_openai_client(target: Any, person: Any, mode: str) -> None:
    with openai.OpenAI(base_url=target.v1, api_key=target.key, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        limit = {"max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens": 300}
        found = client.create(model=target.model, messages=QUESTION, response_model=person, max_retries=1, **limit)
        assert isinstance(found, person)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_stream_of_partial_models(target: Any, person: Any, mode: str) -> None:
    with openai.OpenAI(base_url=target.v1, api_key=target.key, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        found = list(
            client.create_partial(model=target.model, messages=QUESTION, response_model=person, max_tokens=300)
        )
    person.model_validate(found[-1].model_dump())
    assert len(found) > 2


def test_a_model_through_the_anthropic_client(target: Any, person: Any) -> None:
    with anthropic.Anthropic(base_url=target.root, api_key=target.key, max_retries=0) as plain:
        client = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
        found = client.create(model=target.model, messages=QUESTION, response_model=person, max_tokens=300)
    assert isinstance(found, person)
