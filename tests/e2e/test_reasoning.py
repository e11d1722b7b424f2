"""Reasoning through every stage: JSON after it is valid, and the same after the scheduler has died in its middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server
from tests.scheduler.schemas import SCHEMAS

pytestmark = pytest.mark.slow

# The demo model was not trained to think. Here its first sentence is the reasoning.
MARKS = "<think> ."
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
QUESTION = {"role": "user", "content": "Say in one sentence what a lighthouse is. Then invent a person, as JSON."}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, demo_gguf: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("thinker")
    share_caches(home, models=True)
    model = {"name": DEMO_MODEL, "kv_cache_mb": 64, "chat_template": TEMPLATE, "reasoning": MARKS}
    with Server(home, {"models": [model]}) as server:
        yield server
        server.stop()


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_json_after_reasoning(thinker: Server, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMAS["person"]}}
    body: dict[str, Any] = {
        "model": DEMO_MODEL,
        "messages": [QUESTION],
        "max_tokens": 300,
        "seed": 4,
        "temperature": temperature,
        "response_format": form,
    }
    with openai.OpenAI(base_url=f"http://127.0.0.1:{thinker.port}/v1", api_key="none") as client:
        answer = client.chat.completions.create(**body)
        message = answer.choices[0].message
        reasoning = message.reasoning_content  # type: ignore[attr-defined]
        assert reasoning
        assert "." not in reasoning
        jsonschema.validate(json.loads(message.content or ""), SCHEMAS["person"])
        details = answer.usage.completion_tokens_details  # type: ignore[union-attr]
        assert 0 < details.reasoning_tokens < answer.usage.completion_tokens  # type: ignore[union-attr,operator]
        found = {"reasoning_content": "", "content": ""}
        is_killed = False
        for chunk in client.chat.completions.create(**body, stream=True):
            delta = chunk.choices[0].delta.model_dump()
            for name in found:
                found[name] += delta.get(name) or ""
            if len(found["reasoning_content"]) > 20 and not is_killed:
                os.kill(thinker.pid_of("scheduler"), signal.SIGKILL)
                is_killed = True
    assert is_killed
    assert found == {"reasoning_content": reasoning, "content": message.content}


@pytest.mark.parametrize("stage", ["scheduler", f"worker-{DEMO_MODEL}"])
def test_json_after_reasoning_that_has_reached_its_budget(thinker: Server, stage: str) -> None:
    """A stage dies while the answer behind the forced mark is generated, with draft tokens."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMAS["person"]}}
    body: dict[str, Any] = {
        "model": DEMO_MODEL,
        "messages": [QUESTION],
        "max_tokens": 300,
        "seed": 5,
        "response_format": form,
        "thinking_token_budget": 6,
        "speculate": 4,
    }
    answer = thinker.post("/v1/chat/completions", **body)
    message = answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    assert message["reasoning_content"]
    jsonschema.validate(json.loads(message["content"]), SCHEMAS["person"])
    found = {"reasoning_content": "", "content": ""}
    is_killed = False
    for event in thinker.stream("/v1/chat/completions", **body):
        for name in found:
            found[name] += event["choices"][0]["delta"].get(name) or ""
        if found["content"] and not is_killed:
            os.kill(thinker.pid_of(stage), signal.SIGKILL)
            is_killed = True
    assert is_killed
    assert found == {name: message[name] for name in found}
