"""docs/api/compatibility.md is true: each parameter of its tables, sent to a server, has the outcome of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic.types.beta.message_create_params
import anthropic.types.message_create_params
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.embedding_create_params
import openai.types.responses.response_create_params
import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.server import ROOT, Server

PAGE = ROOT / "docs" / "api" / "compatibility.md"
CHAT = {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": DEMO_MODEL, "prompt": "Hi", "max_tokens": 1, "seed": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 1, "seed": 1},
    "/v1/completions": TEXT,
    "/v1/responses": {"model": DEMO_MODEL, "input": "Hi", "max_output_tokens": 1, "seed": 1, "store": False},
    "/v1/messages": {**CHAT, "max_tokens": 1, "seed": 1},
    "/v1/embeddings": {"model": DEMO_MODEL, "input": "Hi"},
}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# A value that is not a default, and what it needs beside it. "refused": a value that the table does not list.
SAMPLES: dict[str, Any] = {
    "adaptive_target": 0.5,
    "add_generation_prompt": False,
    "background": True,
    "best_of": 2,
    "cache_salt": "salt",
    "chat_template_kwargs": {"variable": True},
    "choice": [" yes", " no"],
    "continue_final_message": True,
    "conversation": "conv_0",
    "documents": [{"title": "a", "text": "b"}],
    "dry_allowed_length": 3,
    "dry_base": 2.0,
    "dry_multiplier": 0.8,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n"],
    "echo": True,
    "encoding_format": "base64",
    "dimensions": 4,
    "frequency_penalty": 0.5,
    "grammar": 'root ::= "a"',
    "guided_choice": [" yes"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": SCHEMA,
    "guided_regex": "[a-z]+",
    "ignore_eos": True,
    "include_reasoning": False,
    "input": "Hello",
    "instructions": "Be brief.",
    "json_schema": SCHEMA,
    "keep_alive": "1h",
    "logit_bias": {"5": 1},
    "logprobs": 1,
    "max_completion_tokens": 2,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "Hello"}],
    "metadata": {"name": "text"},
    "min_p": 0.1,
    "min_tokens": 1,
    "model": DEMO_MODEL,
    "n": 2,
    "order": ["mask", "temperature"],
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "Hello"},
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt": "Hello",
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "none"},
    "reasoning_budget_tokens": 5,
    "reasoning_effort": "none",
    "reasoning_format": "none",
    "regex": "[a-z]+",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "safety_identifier": "id",
    "seed": 2,
    "service_tier": "auto",
    "skip_special_tokens": False,
    "speculate": 2,
    "stop": ["\n\n"],
    "stop_sequences": ["\n\n"],
    "stop_token_ids": [5],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "[a-z]+"},
    "suffix": "end",
    "system": "Be brief.",
    "temperature": 0.5,
    "template_date": "2026-03-01",
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "disabled"},
    "thinking_token_budget": 5,
    "tool_choice": "none",
    "tools": [{"type": "function", "function": FUNCTION}],
    "top_k": 5,
    "top_logprobs": 2,
    "top_n_sigma": 1.5,
    "top_p": 0.5,
    "typical_p": 0.5,
    "user": "name",
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
}
ANTHROPIC_TOOL = {"name": "add", "input_schema": {"type": "object"}}
OF_ENDPOINT: dict[tuple[str, str], Any] = {
    ("/v1/chat/completions", "logprobs"): True,
    ("/v1/messages", "metadata"): {"user_id": "name"},
    ("/v1/messages", "tools"): [ANTHROPIC_TOOL],
    ("/v1/messages", "tool_choice"): {"type": "none"},
    ("/v1/messages", "cache_control"): {"type": "ephemeral"},
    ("/v1/messages", "context_management"): {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ("/v1/messages", "output_config"): {"format": {"type": "json_schema", "schema": SCHEMA}},
    ("/v1/messages", "output_format"): {"type": "json_schema", "schema": SCHEMA},
    ("/v1/responses", "tools"): [{"type": "function", **FUNCTION}],
}
BESIDE: dict[str, dict[str, Any]] = {
    "background": {"store": True},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "dry_allowed_length": {"dry_multiplier": 0.8},
    "max_completion_tokens": {"max_tokens": 2},
}
# Supported, and refused here: the demo model has no tokens for it; there is no such conversation or response.
NEEDS_MORE = ("suffix", "conversation", "previous_response_id")


class Row(NamedTuple):
    """A row of a table. `accepted`: of a refused parameter, the values that are accepted."""

    path: str
    name: str
    outcome: str
    accepted: list[Any]
    apis: set[str]

    @property
    def is_hint(self) -> bool:
        return self.outcome == "no effect"


def rows() -> Iterator[Row]:
    path, apis = "", []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## POST "):
            path = line.removeprefix("## POST ")
        elif line.startswith("| parameter "):
            apis = [cell.strip() for cell in line.split("|")[2:-2]]
        elif line.startswith("| `"):
            name, *marks, starling = (cell.strip() for cell in line.split("|")[1:-1])
            outcome, _, accepted = starling.partition(" but for ")
            values = [json.loads(value) for value in re.findall(r"`([^`]*)`", accepted)]
            yield Row(path, name.strip("`"), outcome, values, {api for api, mark in zip(apis, marks) if mark})


ROWS = list(rows())


def send(server: Server, row: Row, value: Any) -> tuple[int, Any]:
    beside = BESIDE.get(row.name, {}) if row.outcome == "supported" else {}
    body = {**BODIES[row.path], **beside, row.name: value}
    status, answer, _ = server.request("POST", row.path, body)
    return status, answer


def shown(answer: Any) -> Any:
    """What an answer says, without what differs between equal requests."""
    part = answer.get("choices") or answer.get("content") or answer.get("data")
    return part or [[item["type"], item["content"]] for item in answer["output"]]


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_each_parameter_has_the_outcome_of_the_table(demo_server: Server, path: str) -> None:
    of_path = [row for row in ROWS if row.path == path]
    for row in of_path:
        sample = OF_ENDPOINT.get((path, row.name), SAMPLES.get(row.name, "another value"))
        status, answer = send(demo_server, row, sample)
        if row.outcome == "refused" or row.name in NEEDS_MORE:
            assert status in (400, 404), (row, status, answer)
            assert row.name in (answer["error"].get("param") or answer["error"]["message"]), (row, answer)
            assert ("unknown parameter" in answer["error"]["message"]) <= (row.outcome == "refused"), (row, answer)
        else:
            assert status == 200, (row, answer)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_hints_and_defaults_of_others_change_nothing(demo_server: Server, path: str) -> None:
    of_path = [row for row in ROWS if row.path == path]
    plain = shown(demo_server.post(path, **BODIES[path]))
    hints = {row.name: OF_ENDPOINT.get((path, row.name), SAMPLES.get(row.name)) for row in of_path if row.is_hint}
    assert shown(demo_server.post(path, **BODIES[path], **hints)) == plain
    for index in range(max((len(row.accepted) for row in of_path), default=0)):
        accepted = {row.name: row.accepted[index] for row in of_path if index < len(row.accepted)}
        assert shown(demo_server.post(path, **BODIES[path], **accepted)) == plain, accepted


def annotations(module: Any, *classes: str) -> set[str]:
    return {name for one in classes for name in getattr(module, one).__annotations__}


def test_the_columns_have_the_parameters_of_the_official_clients() -> None:
    base = "MessageCreateParamsBase"
    headers = {"betas", "user_profile_id", "workspace_id"}  # the client sends these as headers
    known = {
        ("/v1/chat/completions", "OpenAI"): annotations(
            openai.types.chat.completion_create_params, "CompletionCreateParamsBase"
        ),
        ("/v1/completions", "OpenAI"): annotations(openai.types.completion_create_params, "CompletionCreateParamsBase"),
        ("/v1/responses", "OpenAI"): annotations(
            openai.types.responses.response_create_params, "ResponseCreateParamsBase"
        ),
        ("/v1/embeddings", "OpenAI"): annotations(openai.types.embedding_create_params, "EmbeddingCreateParams"),
        ("/v1/messages", "Anthropic"): annotations(anthropic.types.message_create_params, base)
        | annotations(anthropic.types.beta.message_create_params, base) - headers,
    }
    known["/v1/messages", "Anthropic"] -= headers
    for (path, api), names in known.items():
        listed = {row.name for row in ROWS if row.path == path and api in row.apis}
        assert names <= listed, (path, names - listed)


def test_the_tables_have_every_field_that_the_server_reads() -> None:
    from pipeline.api.requests import chat, completions, embeddings, messages, responses

    tables = {
        "/v1/chat/completions": chat.BODY,
        "/v1/completions": completions.BODY,
        "/v1/responses": responses.BODY,
        "/v1/messages": messages.BODY,
        "/v1/embeddings": embeddings.BODY,
    }
    for path, table in tables.items():
        listed = {row.name: row.outcome for row in ROWS if row.path == path}
        assert set(table.fields) <= set(listed), path
        assert {name for name in listed if listed[name] != "refused"} <= set(table.fields), path
