"""Constraints that are made to take time or memory, beside streams of others: those have the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.test_constraints import generate, helper
from tests.scheduler.schemas import SCHEMAS

pytestmark = pytest.mark.slow

PATIENCE_S = 400.0  # slow masks have what other programs leave of the cores

DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"], "additionalProperties": False}
NODE = {"$ref": "#/$defs/node"}
RECURSIVE = {
    "anyOf": [
        {"type": "array", "items": NODE},
        {"type": "object", "additionalProperties": NODE},
        {"type": "string"},
    ]
}
WIDE = {f"p{i}": {"type": "string"} for i in range(400)}
HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"json_schema": DEEP},
    "huge enum": {"json_schema": {"enum": [f"value {i} of {i * 7919 % 1000003}" for i in range(2000)]}},
    "long alternatives": {"choice": [("ab" * (i % 40)) + str(i) for i in range(1000)]},
    "exponential regex": {"regex": "(a|e|i|o|u|.)*[aeiou](a|e|.){400}x"},
    "exponential pattern": {"json_schema": {"type": "string", "pattern": "^.*a.{40}$"}},
    "recursive": {"json_schema": {**NODE, "$defs": {"node": RECURSIVE}}},
    "endless reference": {"json_schema": {"$ref": "#"}},
    "optional properties": {"json_schema": {"type": "object", "properties": WIDE, "additionalProperties": False}},
    "ambiguous": {"grammar": "start: a a a a a a\na: (/[a-z ]/ | /[a-z ]+/ | b)*\nb: /[a-z]/ a?\n"},
}
VICTIMS: list[dict[str, Any]] = [
    {"prompt": "The sky is", "max_tokens": 60, "seed": 3},
    {"json_schema": SCHEMAS["person"], "seed": 5},
]


def test_hostile_constraints_fail_by_name_or_end_and_change_no_other_stream(demo_server: Server) -> None:
    """What is slow moves to the process of low priority; the mask process of the others lives on."""
    undisturbed = [generate(demo_server, **body) for body in VICTIMS]
    masks = helper(demo_server, "mask")
    answers: dict[str, tuple[int, Any]] = {}

    def send(name: str) -> None:
        body = {"prompt": "e e e a a a ", "max_tokens": 30, "seed": 1, **HOSTILE[name]}
        with contextlib.closing(demo_server.connect(PATIENCE_S)) as connection:
            connection.request("POST", "/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answers[name] = response.status, json.loads(response.read())

    threads = [threading.Thread(target=send, args=(name,)) for name in HOSTILE]
    for thread in threads:
        thread.start()
    beside = [generate(demo_server, **body) for body in VICTIMS]
    for thread in threads:
        thread.join()
    assert beside == undisturbed
    assert answers.keys() == HOSTILE.keys()
    for name, (status, answer) in answers.items():
        field = next(iter(HOSTILE[name]))
        assert status in (200, 400, 500), (name, status, answer)
        if status != 200:
            assert field in answer["error"]["message"], (name, answer)
    assert answers["endless reference"][0] == 400
    assert answers["huge enum"][0] == answers["recursive"][0] == 200
    assert helper(demo_server, "mask") == masks
    slow = helper(demo_server, "slow")
    assert os.getpriority(os.PRIO_PROCESS, slow) == 10
    limit = next(line for line in Path(f"/proc/{slow}/limits").read_text().splitlines() if "address space" in line)
    assert limit.split()[3].isdecimal()
    again = [generate(demo_server, **body) for body in VICTIMS]
    assert again == undisturbed
