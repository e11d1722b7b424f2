"""Forced calls: what the grammar lets a model write is read as calls of the demanded tools, with valid arguments."""

from __future__ import annotations

import json
import random
from array import array
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from pipeline.protocol.messages import Constraint, Submit
from stages.gateway.tool_calls.call_grammar import MAX_FORCED_CALLS, call_constraint
from stages.gateway.tool_calls.call_parser import CallBegin, CallEnd, CallParser, Item, Text
from stages.gateway.tool_calls.formats import FORMATS
from stages.gateway.tool_calls.tool_fields import ANY_TOOL, ToolUse, template_form
from stages.scheduler.constraints.frames import VocabularyFile
from stages.scheduler.constraints.grammar import make_tokenizer, new_matcher
from tests.gateway.peers import EOS, MODEL
from tests.gateway.server import Server

CITY = {"type": "string", "maxLength": 5}
TOOLS = [
    template_form("weather", "", {"type": "object", "properties": {"city": CITY}, "required": ["city"]}),
    template_form("flip-it", "", {"properties": {"on": {"type": "boolean"}}, "additionalProperties": False}),
    template_form("now", "", {}),
]
NAMES = tuple(tool["function"]["name"] for tool in TOOLS)
PIECES = [*(bytes([byte]) for byte in range(256)), b"<|end|>", b"<tool_call>", b'{"name": "', b'"}}', b"[TOOL_CALLS]"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    ends = array("I", accumulate(map(len, PIECES)))
    control = array("i", [EOS, len(PIECES) - 1]).tobytes()
    return make_tokenizer(VocabularyFile(b"".join(PIECES), ends.tobytes(), control, (EOS,)))


def generate(tokenizer: Any, constraint: Constraint, draw: random.Random) -> str | None:
    """A text of random tokens that the constraint allows; None if it does not end."""
    matcher = new_matcher(tokenizer, constraint)
    mask = np.zeros(-(-len(PIECES) // 32), np.int32)
    text = b""
    for _ in range(2000):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(PIECES)]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed
        closing = [token for token in allowed if PIECES[token] in (b'"', b"}", b'"}}', b"<|end|>", b"]")]
        token = draw.choice(closing if closing and draw.random() < 0.5 else allowed)
        if token == EOS:
            return text.decode()
        assert matcher.consume_tokens([token])
        text += PIECES[token]
    return None


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize(("forced", "is_single"), [(ANY_TOOL, False), (ANY_TOOL, True), ("weather", False)])
def test_whatever_the_grammar_accepts_is_calls(tokenizer: Any, form: str, forced: str, is_single: bool) -> None:
    use = ToolUse(NAMES, is_single, form, "", forced)
    constraint = call_constraint(use, TOOLS, "tool_choice")
    seen: set[str] = set()
    n_most = 0
    for seed in range(12):
        text = generate(tokenizer, constraint, random.Random(seed))
        if text is None:
            continue
        parser = CallParser(FORMATS[form], NAMES, is_single)
        items: list[Item] = parser.feed(text) + parser.finish()
        assert not [item for item in items if isinstance(item, Text)], text
        names = [item.name for item in items if isinstance(item, CallBegin)]
        ends = [item for item in items if isinstance(item, CallEnd)]
        assert 1 <= len(names) == len(ends) <= (1 if is_single or forced != ANY_TOOL else MAX_FORCED_CALLS)
        for name, end in zip(names, ends):
            assert end.is_complete
            arguments = json.loads(end.closed)
            assert name in (NAMES if forced == ANY_TOOL else (forced,))
            if name == "weather":
                assert len(arguments["city"]) <= 5
            elif name == "flip-it":
                assert set(arguments) <= {"on"}
                assert all(isinstance(value, bool) for value in arguments.values())
        seen |= set(names)
        n_most = max(n_most, len(names))
    assert len(seen) > 1 or forced != ANY_TOOL
    assert seen
    assert n_most > 1 or is_single or forced != ANY_TOOL


def submitted(server: Server) -> Submit:
    frame: Submit = server.peers.generator.submitted[-1]
    return frame


FUNCTION = {"name": "weather", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("choice", "starts"),
    [("required", "start: "), ({"type": "function", "function": {"name": "weather"}}, "start: ")],
)
def test_a_chat_that_demands_a_call_is_constrained(server: Server, choice: Any, starts: str) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": 'please say <tool_call>\\n{"name": "weather", "arguments": {}}'}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": choice,
    }
    choice = server.post("/v1/chat/completions", body).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    constraint = submitted(server).constraint
    assert constraint is not None
    assert (constraint.kind, constraint.field) == ("lark", "tool_choice")
    assert constraint.text.startswith(starts)
    server.post("/v1/chat/completions", {**body, "tools": None, "tool_choice": None})
    assert submitted(server).constraint is None


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_message_that_demands_a_call_is_constrained(server: Server, choice: Any) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 99,
        "messages": [{"role": "user", "content": 'please say <tool_call>\\n{"name": "weather", "arguments": {}}'}],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}, "strict": True}],
        "tool_choice": choice,
    }
    assert server.post("/v1/messages", body).json["stop_reason"] == "tool_use"
    assert submitted(server).constraint is not None
