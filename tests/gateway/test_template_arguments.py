"""Fields of /v1/chat/completions for the chat template: they reach it, and bad ones are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.gateway.server_journal import journaled, prompt

PATH = "/v1/chat/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "{arguments}"}], "max_tokens": 2, "seed": 3}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [True, None, None, {}, False]),
        ({"add_generation_prompt": False}, [False, None, None, {}, False]),
        ({"continue_final_message": True}, [False, None, None, {}, True]),
        (
            {"documents": [{"title": "t", "text": "é"}], "chat_template_kwargs": {"enable_thinking": False, "n": [1]}},
            [True, None, [{"title": "t", "text": "é"}], {"enable_thinking": False, "n": [1]}, False],
        ),
    ],
)
def test_the_template_gets_the_fields(server: Server, fields: dict[str, Any], expected: list[Any]) -> None:
    answer = server.post(PATH, {**CHAT, **fields})
    assert answer.status == 200, answer.error
    (spec,) = (spec for spec in journaled(server) if spec.id == answer.headers["X-Request-Id"])
    assert prompt(spec) == f"user: {json.dumps(expected)}\n"
    assert not spec.generation.template  # the prompt has it


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"documents": {}}, "documents", "must be an array of objects"),
        ({"documents": ["x"]}, "documents[0]", "must be an object"),
        ({"documents": [{}] * 1025}, "documents", "1025 documents; at most 1024"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "give tools beside chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "set by the server; leave it out"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "letters, digits and underscores"),
        ({"chat_template_kwargs": {f"v{i}": 1 for i in range(65)}}, "chat_template_kwargs", "at most 64"),
        ({"chat_template_kwargs": {"n": 1 << 63}}, "chat_template_kwargs", "send it as a string"),
        ({"chat_template_kwargs": {"n": [0] * 16_384}}, "chat_template_kwargs", "more than 16384 values"),
        ({"add_generation_prompt": 1}, "add_generation_prompt", "must be true or false"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "leave one"),
    ],
)
def test_bad_fields_are_refused_by_name(server: Server, fields: dict[str, Any], param: str, message: str) -> None:
    answer = server.post(PATH, {**CHAT, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]
