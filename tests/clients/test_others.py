"""Frameworks with one or two tests each: haystack, smolagents, dspy, and the command `llm`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    return f"It is sunny in {city}."


def test_haystack_calls_a_tool_and_sends_its_result(target: Any) -> None:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    options = {"api_key": Secret.from_token(target.key), "api_base_url": target.v1, "model": target.model}
    pieces: list[str] = []
    generator = OpenAIChatGenerator(streaming_callback=lambda piece: pieces.append(piece.content), **options)
    question = [ChatMessage.from_user("What is the weather in Paris?")]
    plain = generator.run(question, generation_kwargs={"max_tokens": 10, "temperature": 0})["replies"][0]
    assert "".join(pieces) == plain.text
    tool = Tool("weather", "The weather in a city.", WEATHER, weather)
    call = OpenAIChatGenerator(tools=[tool], **options).run(
        question, generation_kwargs={"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    )["replies"][0]
    results = [ChatMessage.from_tool(tool.invoke(**one.arguments), origin=one) for one in call.tool_calls]
    assert len(results) == 1
    last = generator.run([*question, call, *results], generation_kwargs={"max_tokens": 5})["replies"]
    assert last
    assert len(OpenAITextEmbedder(**options).run("a lighthouse")["embedding"]) > 100


def test_haystack_parses_a_pydantic_model(target: Any, person: Any) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(api_key=Secret.from_token(target.key), api_base_url=target.v1, model=target.model)
    answer = generator.run(
        [ChatMessage.from_user("Invent a person.")],
        generation_kwargs={"response_format": person, "max_tokens": 200},
    )["replies"][0]
    person.model_validate_json(answer.text)


def test_smolagents_forces_calls_and_reads_streams(target: Any) -> None:
    from smolagents import OpenAIModel, Tool

    class Weather(Tool):
        name = "weather"
        description = "The weather in a city."
        inputs = {"city": {"type": "string", "description": "The city."}}
        output_type = "string"

        def forward(self, city: str) -> str:
            return weather(city)

    model = OpenAIModel(target.model, api_base=target.v1, api_key=target.key, max_tokens=150, temperature=0)
    question = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]
    answer = model.generate(question, tools_to_call_from=[Weather()], stop_sequences=["Observation:"])
    (call, *_) = answer.tool_calls or ()
    assert call.function.name == "weather"
    pieces = [piece.content or "" for piece in model.generate_stream(question, max_tokens=10)]
    assert "".join(pieces) == model.generate(question, max_tokens=10).content


def test_dspy_predicts_by_a_schema(target: Any) -> None:
    import dspy

    class Answer(dspy.Signature):
        """Answer the question."""

        question: str = dspy.InputField()
        is_true: bool = dspy.OutputField()

    model = dspy.LM(
        f"openai/{target.model}", api_base=target.v1, api_key=target.key, max_tokens=200, cache=False, temperature=0.0
    )
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Answer)(question="Is the sky blue?")
    assert isinstance(found.is_true, bool)


def test_the_command_llm(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    entry = {"model_id": "local", "model_name": target.model, "api_base": target.v1, "api_key_name": "local"}
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{**entry, "supports_schema": True, "supports_tools": True}])
    )
    (tmp_path / "keys.json").write_text(json.dumps({"local": target.key}))
    import llm

    model = llm.get_model("local")
    options = {"max_tokens": 8}
    assert model.prompt("Name three colours.", stream=True, **options).text()
    conversation = model.conversation()
    assert conversation.prompt("Name three colours.", stream=False, **options).text()
    assert conversation.prompt("And two more?", **options).text()
    made = model.prompt("The weather", schema=WEATHER, stream=False, max_tokens=100)
    assert set(json.loads(made.text())) == {"city"}
