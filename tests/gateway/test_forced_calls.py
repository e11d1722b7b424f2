"""Forced calls: what the grammar lets a model write is read as calls of the demanded tools, with valid arguments."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from pipeline.api.constraint_fields import read_schema
from pipeline.api.requests.tool_fields import ANY_TOOL, ToolUse, make_tools, template_form
from pipeline.api.requests.tool_formats import FORMATS
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Constraint, Submit
from stages.gateway.tool_calls.call_grammar import MAX_FORCED_CALLS, answer_constraint, call_constraint
from stages.gateway.tool_calls.call_parser import CallBegin, CallEnd, CallParser, Item, Text
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


def parsed(form: str, is_single: bool, text: str) -> list[Item]:
    parser = CallParser(FORMATS[form], NAMES, is_single)
    return parser.feed(text) + parser.finish()


@pytest.mark.parametrize("form", ["generic", "hermes", "llama3", "qwen3_coder"])
@pytest.mark.parametrize("is_single", [False, True])
def test_calls_of_strict_tools_match_their_schemas_wherever_they_are(
    tokenizer: Any, form: str, is_single: bool
) -> None:
    """A text may have anything in it; each call that is found matches if its tool is strict."""
    use = ToolUse(NAMES, is_single, form, "", "", ("weather", "flip-it"), "tools[0].strict")
    constraint = answer_constraint(use, TOOLS, None)
    assert constraint is not None
    assert constraint.field == "tools[0].strict"
    matcher = new_matcher(tokenizer, constraint)

    def accepts(text: str) -> bool:
        fresh = matcher.deep_copy()
        return all(fresh.consume_tokens([byte]) for byte in text.encode()) and bool(fresh.is_accepting())

    for text in ("", "Hello!", "a < b, <tool", "x\n\ny {}", "Ü [1]"):
        assert accepts(text), text
    key = "parameters" if form == "llama3" else "arguments"
    good, bad, loose = (
        f'{{"name": "{name}", "{key}": {arguments}}}'
        for name, arguments in (("weather", '{"city": "Rome"}'), ("weather", '{"town": "Rome"}'), ("now", '{"x": [1]}'))
    )
    if form == "llama3":
        assert accepts(good)
        assert accepts(f"{good}; {loose}") is not is_single
        assert not accepts(bad)
        assert not accepts(f"<|python_tag|>{bad}")
        assert not accepts(f" {bad}")
        return
    assert accepts(f"I see. <tool_call>\n{good}\n</tool_call>")
    assert accepts(f"<tool_call>{loose}\n</tool_call>")
    both = f"<tool_call>\n{good}\n</tool_call>\n<tool_call>\n{good}\n</tool_call>"
    assert accepts(both) is accepts(f"{both} Done.") is not is_single
    for wrong in (bad, good.replace("weather", "other"), "no JSON"):
        assert not accepts(f"<tool_call>\n{wrong}\n</tool_call>")
    if form == "generic":
        for other in (bad, f" {bad}", f"[TOOL_CALLS] [{bad}]", f"<|python_tag|>{bad}"):
            assert not accepts(other), other


@pytest.mark.parametrize("form", ["generic", "hermes", "llama3", "qwen3_coder"])
def test_a_text_with_strict_tools_has_no_other_calls(tokenizer: Any, form: str) -> None:
    use = ToolUse(NAMES, False, form, "", "", NAMES, "tools[0].strict")
    constraint = answer_constraint(use, TOOLS, None)
    assert constraint is not None
    for seed in range(8):
        text = generate(tokenizer, constraint, random.Random(seed))
        items = parsed(form, False, text or "")
        for item in items:
            if isinstance(item, CallEnd):
                assert item.is_complete
                assert json.loads(item.closed) is not None


@pytest.mark.parametrize("form", ["generic", "hermes", "llama3", "qwen3_coder"])
def test_beside_a_schema_the_answer_is_json_or_calls(tokenizer: Any, form: str) -> None:
    given = Constraint("json_schema", '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}', "f")
    constraint = answer_constraint(ToolUse(NAMES, False, form), TOOLS, given)
    assert constraint is not None
    assert constraint.field == "f"
    n_calls = n_answers = 0
    for seed in range(16):
        text = generate(tokenizer, constraint, random.Random(seed))
        if text is None:
            continue
        items = parsed(form, False, text)
        if any(isinstance(item, CallBegin) for item in items):
            assert not [item for item in items if isinstance(item, Text)], text
            n_calls += 1
        else:
            assert isinstance(json.loads(text)["n"], int)
            n_answers += 1
    assert n_calls
    assert n_answers


def test_where_the_format_leaves_no_choice_the_request_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.strict constrains"):
        answer_constraint(ToolUse(NAMES, False, "mistral", "", "", NAMES, "tools[0].strict"), TOOLS, None)
    assert answer_constraint(ToolUse(NAMES, False, "mistral"), TOOLS, None) is None
    assert answer_constraint(ToolUse(NAMES, False, "mistral", "", ANY_TOOL), TOOLS, None) is not None


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


def test_the_schemas_of_tools_are_bounded_as_other_constraints(make_server: Callable[..., Server]) -> None:
    """The bound counts the grammar of all calls, not only a schema that the request has as its own."""
    server = make_server(scheduler={"constraints": {"max_bytes": 400}})
    server.wait_ready()
    city = {"type": "object", "properties": {"city": {"enum": ["x" * 80]}}}
    tools = [template_form(name, "", city) for name in ("a", "b")]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    assert server.post("/v1/chat/completions", body).status == 200
    one = {"type": "function", "function": {"name": "a"}}
    assert server.post("/v1/chat/completions", {**body, "tool_choice": one}).status == 200
    refused = server.post("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "tool_choice")
    assert "400 bytes (scheduler.constraints.max_bytes)" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "strict", "field"),
    [
        ("auto", (), ""),
        ("auto", (0, 1), "tools[0].strict"),
        ("auto", (1,), ""),
        (ANY_TOOL, (), "choice"),
        ("a", (), ""),
    ],
)
def test_schemas_are_bounded_when_a_request_is_read(choice: str, strict: tuple[int, ...], field: str) -> None:
    """Before the gateway makes a grammar of them in its event loop; only those that the grammar has count."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "x" * 40_000}}}
    tools = [template_form(name, "", schema, index in strict) for index, name in enumerate("ab")]
    if not field:
        assert make_tools(tools, choice, "tools[{}].strict", "choice", is_single=False)
        return
    with pytest.raises(InvalidRequest, match="at most 65536") as refused:
        make_tools(tools, choice, "tools[{}].strict", "choice", is_single=False)
    assert refused.value.param == field


def test_times_of_arguments_have_no_second_60_and_dates_no_year_0(tokenizer: Any) -> None:
    """As those of an answer: many readers of these formats refuse them."""
    at = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}, "required": ["at"]}
    use = ToolUse(("note",), True, "hermes", "", "note")
    matcher = new_matcher(tokenizer, call_constraint(use, [template_form("note", "", at)], "tool_choice"))
    head = b'<tool_call>\n{"name": "note", "arguments": {"at": "'
    for text, is_whole in (("2026-01-02T23:58:59Z", True), ("2026-01-02T23:58:60Z", False), ("0000-01-02T", False)):
        tokens = [*head, *text.encode()]
        assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) is is_whole, text


def test_a_schema_beside_a_demanded_call_has_no_effect(server: Server) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": 'please say <tool_call>\\n{"name": "weather", "arguments": {}}'}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    }
    forced = server.post("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert forced.json["choices"][0]["finish_reason"] == "tool_calls"
    assert submitted(server).constraint.field == "tool_choice"  # type: ignore[union-attr]
    assert server.post("/v1/chat/completions", body).status == 200
    assert submitted(server).constraint.field == "response_format.json_schema.schema"  # type: ignore[union-attr]
    refused = server.post("/v1/chat/completions", {**body, "response_format": None, "regex": "a+"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "regex")


def call_matcher(tokenizer: Any, parameters: dict[str, Any] | None, strict: bool = False) -> Any:
    """A matcher of calls of `note`, forced or in any text, whose arguments match the schema."""
    tool = template_form("note", "", parameters)
    if not strict:
        return new_matcher(tokenizer, call_constraint(ToolUse(("note",), True, "hermes", "", "note"), [tool], "f"))
    use = ToolUse(("note",), True, "hermes", "", "", ("note",), "f")
    constraint = answer_constraint(use, [tool], None)
    assert constraint is not None
    return new_matcher(tokenizer, constraint)


def takes(matcher: Any, arguments: str) -> bool:
    """Whether a call with these arguments is allowed."""
    tokens = [*f'<tool_call>\n{{"name": "note", "arguments": {arguments}}}\n</tool_call>'.encode()]
    fresh = matcher.deep_copy()
    return fresh.try_consume_tokens(tokens) == len(tokens) and bool(fresh.is_accepting())


@pytest.mark.parametrize("strict", [False, True])
def test_schemas_of_tools_may_have_keywords_that_restrict_nothing(tokenizer: Any, strict: bool) -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    secret = {"type": "string", "format": "password"}
    parameters = {"type": "object", "properties": {"record": record, "secret": secret, "never": {"not": {}}}}
    matcher = call_matcher(tokenizer, {**parameters, "dependencies": {}, "unevaluatedProperties": False}, strict)
    assert takes(matcher, '{"record": {"a": 1}, "secret": "x"}')
    assert not takes(matcher, '{"record": {"a": "b"}}')
    assert not takes(matcher, '{"never": 1}')
    assert not takes(matcher, '{"other": 1}')


UNION = {
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": name, "default": name}, "n": {"type": "integer"}}}
        for name in ("a", "b")
    },
    "type": "object",
    "properties": {
        "u": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "kind"}}
    },
}


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_may_be_discriminated_unions(tokenizer: Any, strict: bool) -> None:
    matcher = call_matcher(tokenizer, UNION, strict)
    assert takes(matcher, '{"u": {"kind": "b", "n": 1}}')
    for wrong in ('{"u": {"n": 1}}', '{"u": {"kind": "c"}}', '{"u": {"kind": "a", "x": 1}}'):
        assert not takes(matcher, wrong)


def test_schemas_keep_their_options_for_the_library_beside_tools(tokenizer: Any) -> None:
    """Those of an answer, and those of the arguments of a tool."""
    options = {"x-guidance": {"coerce_one_of": True, "whitespace_pattern": ""}}
    unions: dict[str, Any] = {
        "type": "object",
        "properties": {"u": {"oneOf": [{"minimum": 0}, {"maximum": 0}]}},
        **options,
    }
    matcher = call_matcher(tokenizer, unions)
    assert takes(matcher, '{"u":1}')
    assert not takes(matcher, '{"u": 1}')
    tools = [template_form("now", "", {})]
    constraint = answer_constraint(ToolUse(("now",), False, "hermes"), tools, read_schema(unions, "f"))
    assert constraint is not None
    fresh = new_matcher(tokenizer, constraint)
    assert fresh.try_consume_tokens([*b'{"u":1}']) == 7
    assert fresh.is_accepting()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("parameters", [None, {"type": "object", "properties": {}}, {"properties": {}, "required": []}])
def test_calls_of_tools_without_parameters_have_no_arguments(tokenizer: Any, parameters: Any, strict: bool) -> None:
    matcher = call_matcher(tokenizer, parameters, strict)
    assert takes(matcher, "{}")
    assert not takes(matcher, '{"city": "Rome"}')
    assert takes(call_matcher(tokenizer, {"type": "object"}, strict), '{"city": "Rome"}')
