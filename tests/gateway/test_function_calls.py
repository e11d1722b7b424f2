"""Calls in Qwen3-Coder's form: values of the types of the schemas, whatever the cuts of the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api import json_body
from pipeline.api.json_body import MAX_DIGITS
from pipeline.api.json_prefix import MAX_DEPTH, JsonValue
from pipeline.api.requests.tool_fields import template_form
from pipeline.api.requests.tool_formats import FORMATS
from stages.gateway.endpoints.body_readers import Body, read_request_body
from stages.gateway.http.parser_pool import INLINE_BYTES, ParserPool
from stages.gateway.tool_calls import call_parser, function_body
from stages.gateway.tool_calls import parameter_types as types_module
from stages.gateway.tool_calls.call_parser import Arguments, CallBegin, CallEnd, CallParser, Item, Text
from stages.gateway.tool_calls.parameter_types import parameter_types
from tests.gateway import test_chat_tools, test_messages
from tests.gateway.peers import MODEL, make_tokenizer
from tests.gateway.server import Server
from tests.properties import examples

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": ["number", "null"]},
        "on": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/a~1b"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"enum": [1, 2.5, None]},
        "any": {},
        "all": True,
        "loop": {"$ref": "#/properties/loop"},
        "away": {"$ref": "https://example.org/"},
    },
    "$defs": {"a/b": {"type": "object"}},
}
TOOLS = [template_form("edit", "", SCHEMA), template_form("now", "", {}), template_form("odd", "", {"properties": 5})]
TYPES = parameter_types(TOOLS)
NAMES = ("edit", "now", "odd")


def parse(text: str, cuts: tuple[int, ...] = (), *, is_single: bool = False) -> list[Item]:
    """The items of a text that comes in parts, with adjacent texts and arguments joined."""
    parser = CallParser(FORMATS["qwen3_coder"], NAMES, is_single, TYPES)
    items: list[Item] = []
    ends = [*sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    for begin, end in zip([0, *ends], ends):
        items += parser.feed(text[begin:end])
    joined: list[Item] = []
    for item in items + parser.finish():
        if joined and isinstance(item, Text | Arguments) and type(joined[-1]) is type(item):
            joined[-1] = type(item)(joined[-1][0] + item.text)  # type: ignore[operator]
        else:
            joined.append(item)
    return joined


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(body: str, name: str = "edit") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def test_types_follow_from_the_schemas() -> None:
    assert TYPES == (
        ("edit", "n", "number"),
        ("edit", "x", "null|number"),
        ("edit", "on", "boolean"),
        ("edit", "items", "array"),
        ("edit", "where", "object"),
        ("edit", "note", "null|string"),
        ("edit", "level", "null|number"),
    )


def test_each_schema_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred references at each of some levels would be 10 ** 16 paths, and a long one takes time to read."""
    far = {"$ref": "#" + "/" * 10_000}
    parameters = {
        "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"type": "integer"}, "z": {"type": [["string"], {}, "array"]}},
        "$defs": {
            "A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}] * 50},
            "B": {"oneOf": [far, {"allOf": [{"$ref": "#/$defs/A"}, {"enum": [1, True]}]}]},
        },
    }
    tools = [template_form(name, "", json.loads(json.dumps(parameters))) for name in ("a", "b")]
    target, n_read = types_module._target, 0

    def counted(reference: str, root: dict[str, Any]) -> Any:
        nonlocal n_read
        n_read += len(reference)
        return target(reference, root)

    monkeypatch.setattr(types_module, "_target", counted)
    expected = (("x", "boolean|number"), ("y", "number"), ("z", "array"))
    assert parameter_types(tools) == tuple((name, *types) for name in ("a", "b") for types in expected)
    assert 2 * len(far["$ref"]) < n_read < len(json.dumps(tools))


def test_types_depend_on_no_other_tool_and_no_level() -> None:
    number: dict[str, Any] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    for _ in range(40):
        number = {"allOf": [number]}
    schema = {"properties": {f"p{index}": number for index in range(11)}}
    tools = [template_form(f"t{index}", "", json.loads(json.dumps(schema))) for index in range(128)]
    found = parameter_types(tools)
    assert len(found) == 128 * 11
    assert {types for _, _, types in found} == {"null|number"}


def test_a_reference_is_read_as_far_as_a_schema_may_lie() -> None:
    root: dict[str, Any] = {"type": "integer"}
    for _ in range(json_body.MAX_DEPTH - 1):
        root = {"": root}
    known = {"$ref": "#" + "/" * (json_body.MAX_DEPTH - 1)}
    root |= {"properties": {"x": known, "y": {"$ref": known["$ref"] + "/" * 10_000}}}
    assert parameter_types([template_form("a", "", root)]) == (("a", "x", "number"),)


def chat_body(tools: list[dict[str, Any]]) -> Body:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    return Body(json.dumps(body).encode(), "chat", "application/json", "", 16 << 20)


async def test_the_schemas_of_a_large_body_are_read_where_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the gateway they would stop every stream, for half a second."""
    assert read_request_body(chat_body(TOOLS)).tools.types == TYPES
    large = template_form("big", "", {"properties": {"x": {"anyOf": [{"type": "null"}, *({} for _ in range(3_000))]}}})
    body = chat_body([*TOOLS, large])
    assert len(body.data) < INLINE_BYTES

    def read(schema: Any, root: dict[str, Any]) -> Any:
        raise AssertionError("in this process")

    monkeypatch.setattr(types_module, "_read", read)
    parsers = ParserPool()
    try:
        request = await parsers.read(body, "a")
    finally:
        await parsers.close()
    assert request.tools.types == (*TYPES, ("big", "x", "null"))


VALUES: list[tuple[str, str, Any]] = [
    ("path", "a/b.py", "a/b.py"),
    ("path", "5", "5"),
    ("path", "", ""),
    ("path", '\n  if a < "b":\n\treturn </p> \\ ä🐦\n', '\n  if a < "b":\n\treturn </p> \\ ä🐦\n'),
    ("path", "null", "null"),
    ("unknown", "[1]", "[1]"),
    ("any", "{}", "{}"),
    ("n", "17", 17),
    ("n", " -17 ", -17),
    ("n", "1" * MAX_DIGITS, int("1" * MAX_DIGITS)),
    ("n", "1" * (MAX_DIGITS + 1), "1" * (MAX_DIGITS + 1)),  # no body may have that number
    ("n", "1e999", "1e999"),
    ("n", "1\n\n2", "1\n\n2"),
    ("n", "\n 1\n", 1),
    ("n", "five", "five"),
    ("n", "", ""),
    ("n", "1, 2", "1, 2"),
    ("x", "-2.5e3", -2500.0),
    ("x", "null", None),
    ("x", "None", None),
    ("on", "true", True),
    ("on", "False", False),
    ("on", "1", "1"),
    ("items", '["a",\n "b"]', ["a", "b"]),
    ("items", '["a\nb"]', ["a\nb"]),
    ("items", '["a"', '["a"'),
    ("items", "[] []", "[] []"),
    ("items", "[1], [2]", "[1], [2]"),
    ("items", "[1]]", "[1]]"),
    ("items", "[" * MAX_DEPTH + "]" * MAX_DEPTH, "[" * MAX_DEPTH + "]" * MAX_DEPTH),  # too deep in the object around it
    ("where", '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ("where", '"text"', '"text"'),
    ("note", "null", None),
    ("note", "nul", "nul"),
    ("note", "nullable", "nullable"),
    ("note", "Berlin", "Berlin"),
    ("note", "a null", "a null"),
    ("note", "nnull", "nnull"),
    ("note", "", ""),
    ("level", "2.5", 2.5),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values(key: str, text: str, value: Any) -> None:
    whole = call(parameter("path2", "x") + parameter(key, text))
    items = parse(whole)
    assert [type(item) for item in items] == [CallBegin, Arguments, CallEnd]
    end = items[-1]
    assert isinstance(end, CallEnd)
    assert end.is_complete
    assert json.loads(end.closed) == {"path2": "x", key: value}
    assert parse(whole, tuple(range(1, len(whole)))) == items
    assert parse(whole.replace(f">\n{text}\n<", f">{text}<")) == items or text.startswith("\n")


EDIT = '{"path": "a", "n": 1}'
PARTS = parameter("path", "a") + parameter("n", "1")
CALLS: list[tuple[str, list[Item]]] = [
    (f"I look.\n\n{call(PARTS)}\n", [Text("I look."), CallBegin("edit"), Arguments(EDIT), CallEnd(True, EDIT)]),
    (call("", "now"), [CallBegin("now"), Arguments("{}"), CallEnd(True, "{}")]),
    (
        f"{call('', 'now')}\n{call('', 'odd')} Done.",
        [
            *(CallBegin("now"), Arguments("{}"), CallEnd(True, "{}")),
            *(CallBegin("odd"), Arguments("{}"), CallEnd(True, "{}")),
            Text("Done."),
        ],
    ),
    # The tags around the function are left out, or around several.
    (f"<function=edit>{PARTS}</function>\n</tool_call>", [CallBegin("edit"), Arguments(EDIT), CallEnd(True, EDIT)]),
    (
        "<tool_call><function=now></function><function=now></function></tool_call>",
        [
            *(CallBegin("now"), Arguments("{}"), CallEnd(True, "{}")) * 2,
        ],
    ),
    # JSON, as of forced calls.
    (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [
            *(CallBegin("now"), Arguments("{}"), CallEnd(True, "{}")),
        ],
    ),
    # JSON, as other templates have it behind the name.
    (
        f"I look. <function=edit>{EDIT}</function>\nDone.",
        [Text("I look."), CallBegin("edit"), Arguments(EDIT), CallEnd(True, EDIT), Text("Done.")],
    ),
    (
        '<tool_call>\n<function=now>\n{}\n</function>\n</tool_call><function=edit> {"path": "a\nb"}</func',
        [
            *(CallBegin("now"), Arguments("{}"), CallEnd(True, "{}")),
            *(CallBegin("edit"), Arguments('{"path": "a\\nb"}'), CallEnd(True, '{"path": "a\\nb"}')),
        ],
    ),
    # The name of a tool in text.
    (
        "Use `<function=now>`: <function=now></function>",
        [Text("Use `<function=now>`:"), CallBegin("now"), Arguments("{}"), CallEnd(True, "{}")],
    ),
    # Cut off, and broken.
    (call(PARTS)[:-40], [CallBegin("edit"), Arguments('{"path": "a", "n": '), CallEnd(False, '{"path": "a"}')]),
    (
        call(f"{parameter('path', 'a')}oops"),
        [
            *(CallBegin("edit"), Arguments('{"path": "a"'), CallEnd(False, '{"path": "a"}')),
            Text("oops</function>\n</tool_call>"),
        ],
    ),
    (
        call(parameter("path", "a") * 2),
        [
            *(CallBegin("edit"), Arguments('{"path": "a"'), CallEnd(False, '{"path": "a"}')),
            Text(f"{parameter('path', 'a')}</function>\n</tool_call>"),
        ],
    ),
]


@pytest.mark.parametrize(("text", "expected"), CALLS)
def test_calls(text: str, expected: list[Item]) -> None:
    assert parse(text) == expected
    assert parse(text, tuple(range(1, len(text)))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call><func",
        "<tool_call>\n<function=now",
        "<function=>",
        f"<function={'n' * 200}>",
        "a <b> <function",
        "<tool_call> <parameter=a>",
        "Use <function=edit> to edit.",
        "Write `<function=edit>` and `<parameter=path>`.",
        "<function=edit>",
        "<function=edit>\n<param",
        "<function=edit><parameter=>",
        f"<function=edit>{' ' * 5000}<parameter=path>",
    ],
)
def test_what_is_not_a_call_comes_back_as_text(text: str) -> None:
    assert parse(text) == [Text(text)]
    assert parse(text, tuple(range(1, len(text)))) == [Text(text)]


def test_strings_are_not_held_back() -> None:
    parser = CallParser(FORMATS["qwen3_coder"], NAMES, False, TYPES)
    assert parser.feed("<tool_call>\n<function=edit>") == []
    assert parser.feed("\n<parameter=path>\nab") == [CallBegin("edit"), Arguments('{"path": "ab')]
    assert parser.feed("c\n</para") == [Arguments("c")]
    assert parser.feed("d") == [Arguments("\\n</parad")]
    assert parser.feed("</parameter>\n<parameter=n>\n1") == [Arguments('", "n": ')]
    assert parser.feed("2\n</parameter>\n</function>") == [
        Arguments("12}"),
        CallEnd(True, '{"path": "abc\\n</parad", "n": 12}'),
    ]
    assert parser.feed("\n</tool_call>") == parser.finish() == []


def test_a_long_array_is_checked_while_it_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, all of it would hold the event loop."""
    n_checked = 0

    class Counted(JsonValue):
        def feed(self, text: str, at: int, end: int) -> int:
            nonlocal n_checked
            n_checked += end - at
            return super().feed(text, at, end)

    for module in (function_body, call_parser):
        monkeypatch.setattr(module, "JsonValue", Counted)
    parser = CallParser(FORMATS["qwen3_coder"], NAMES, False, TYPES)
    array = json.dumps([1] * 1000)
    parser.feed("<function=edit>\n<parameter=items>\n")
    for at in range(0, len(array), 7):
        assert parser.feed(array[at : at + 7]) == []
    assert n_checked == len(array)
    rest, end = parser.feed("\n</parameter>\n</function>")
    assert rest == Arguments(f"{array}}}")
    assert end == CallEnd(True, f'{{"items": {array}}}')
    assert n_checked < len(array) + 10


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=edit>", "<function=now>", "<function=", "</function>", "<parameter="),
    *("<parameter=path>", "<parameter=n>", "<parameter=note>", "<parameter=items>", "</parameter>", "</param", "\n"),
    '{"path": 1}',
    *(parameter("path", 'a"b\n'), parameter("x", "null"), parameter("items", "[1]"), call(PARTS), call("", "now")),
    *('{"name": "now", "arguments": {}}', "1", "nul", "true", "ä🐦", "<", ">", " ", "\x01", "\\", "edit"),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


@settings(max_examples=examples(30))
@given(texts, st.lists(st.integers(1, 300), max_size=20), st.booleans())
def test_the_cuts_of_a_text_do_not_matter(text: str, cuts: list[int], is_single: bool) -> None:
    whole = parse(text, is_single=is_single)
    assert parse(text, tuple(cuts), is_single=is_single) == whole
    assert parse(text, tuple(range(1, len(text))), is_single=is_single) == whole
    for item in whole:
        if isinstance(item, CallEnd):
            assert isinstance(json.loads(item.closed), dict)


@pytest.fixture(scope="module")
def coder(homes: Callable[[], Path]) -> Iterator[Server]:
    """A server whose model writes calls in this form."""
    running = Server(homes(), tokenizer=partial(make_tokenizer, tool_format="qwen3_coder"))
    running.wait_ready()
    yield running
    assert running.close() == 0


def test_a_server_gives_values_the_types_of_the_schema(coder: Server) -> None:
    """Whole, streamed, and as Anthropic's messages; a demanded call is JSON."""
    say = call(parameter("path", "a\nb") + parameter("n", "5")).replace("\n", "\\n")
    messages = [{"role": "user", "content": f"please say {say}"}]
    expected = {"path": "a\nb", "n": 5}
    body = {"model": MODEL, "messages": messages, "tools": TOOLS[:1], "seed": 1}
    (choice,) = coder.post("/v1/chat/completions", body).json["choices"]
    padded = json.dumps(body).encode() + b" " * INLINE_BYTES  # parsed in another process
    assert coder.post("/v1/chat/completions", padded).json["choices"] == [choice]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == expected
    streamed = test_chat_tools.accumulated(coder.stream("/v1/chat/completions", body).all())[0]
    assert streamed["tool_calls"][0]["arguments"] == choice["message"]["tool_calls"][0]["function"]["arguments"]
    tool = {"name": "edit", "input_schema": SCHEMA}
    body = {"model": MODEL, "max_tokens": 280, "messages": messages, "tools": [tool], "seed": 1}
    (block,) = coder.post("/v1/messages", body).json["content"]
    assert (block["name"], block["input"]) == ("edit", expected)
    whole = test_messages.assembled(test_messages.read_events(coder, "/v1/messages", body))
    assert json.loads(whole["content"][0]["raw"]) == expected
    assert coder.post("/v1/messages", {**body, "tool_choice": {"type": "any"}}).status == 200
    constraint = coder.peers.generator.submitted[-1].constraint
    assert constraint is not None
    assert "<tool_call>" in constraint.text and "<function=" not in constraint.text
