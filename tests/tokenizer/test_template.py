"""Chat templates: messages are literal text, and a template is bounded in time and memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import InvalidRequest
from stages.tokenizer import template_budget
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.template_marks import TemplateMarks
from tests.properties import examples
from tests.tokenizer.chat_templates import (
    ALWAYS,
    CHATML,
    CHATML_TOOLS,
    CONTROL,
    LLAMA3,
    MISTRAL,
    TEMPLATES,
    chat_vocabulary,
)
from tools.tiny_gguf import _CHAT_TEMPLATE

VOCABULARY = chat_vocabulary()
SOURCES = {**TEMPLATES, "tiny": _CHAT_TEMPLATE}
COMPILED = {
    name: ChatTemplate(source, "<s>", "</s>", control_names=VOCABULARY.control_names)
    for name, source in SOURCES.items()
}
NAMES = [*CONTROL, "<s>", "</s>"]
FRAGMENTS = [part for name in NAMES for part in (name, name[:-1], name[1:], name[:2], name[-2:], name[0], name[-1])]
PLAIN_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.lists(st.sampled_from([*ALWAYS, "<tool_response>", "<", "<b>", "|", "[", "a", " ", "\n", "</"])).map("".join),
)
HOSTILE_TEXT = st.lists(st.sampled_from([*FRAGMENTS, "\n", "user", "im_start", "é", "a", '"', "\\"]), max_size=12).map(
    "".join
)
ROLES = ("system", "user", "assistant")


def chats(content: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    message = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": content})
    return st.lists(message, min_size=1, max_size=5)


def encode(template: ChatTemplate, *arguments: Any) -> list[int]:
    # Collecting the garbage of a process with thousands of tests may take longer than a rendering is allowed to.
    with patch.object(template_budget, "MAX_CPU_S", 60.0):
        chat = template.render(*arguments)
    return VOCABULARY.encode(chat.text, True, add_bos=True, marks=chat.marks)


def render_plainly(source: str, messages: Any, prompt: bool = True, tools: Any = None) -> str:
    """Render without marks and bounds: the reference for texts without control tokens."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(source).render(
        messages=messages, add_generation_prompt=prompt, tools=tools, bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("name", SOURCES)
@settings(deadline=None, max_examples=examples(30))  # some ms each, of each template
@given(data=st.data())
def test_a_chat_without_control_text_has_the_tokens_of_its_plain_rendering(name: str, data: st.DataObject) -> None:
    messages = [
        {**message, "content": "".join(part for part in [message["content"]] if not any(n in part for n in NAMES))}
        for message in data.draw(chats(PLAIN_TEXT))
    ]
    prompt = data.draw(st.booleans())
    tools = data.draw(st.none() | st.lists(st.fixed_dictionaries({"name": st.just("f<b>")}), max_size=2))
    plain = render_plainly(SOURCES[name], messages, prompt, tools)
    assert encode(COMPILED[name], messages, prompt, tools) == VOCABULARY.encode(plain, True, add_bos=True)


@pytest.mark.parametrize("name", SOURCES)
@settings(deadline=None, max_examples=examples(30))  # some ms each, of each template
@given(data=st.data())
def test_messages_cannot_forge_a_turn(name: str, data: st.DataObject) -> None:
    messages = data.draw(chats(HOSTILE_TEXT))
    tools = data.draw(st.none() | st.lists(st.fixed_dictionaries({"name": HOSTILE_TEXT}), min_size=1, max_size=2))
    harmless = [{**message, "content": "a"} for message in messages]
    harmless_tools = tools and [{"name": "f"} for _ in tools]
    tokens = encode(COMPILED[name], messages, True, tools)
    expected = encode(COMPILED[name], harmless, True, harmless_tools)
    assert [t for t in tokens if t in VOCABULARY.control] == [t for t in expected if t in VOCABULARY.control]
    assert VOCABULARY.decode(tokens) == render_plainly(SOURCES[name], messages, True, tools)


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].content | trim",
        "messages[0].content.split('x') | join('')",
        "messages[0].content.split('x') | join('<|im_end|>')",
        "messages[0].content.replace('x', '')",
        "messages[0].content[:-1]",
        "messages[0].content[1:] ~ '|>'",
        "'<|' ~ messages[0].content",
        "messages[0] | tojson",
        "messages[0].content | lower",
        "'%s' % messages[0].content",
        "'{}'.format(messages[0].content)",
        "messages | map(attribute='content') | join",
        "messages",
        "messages[0].content | list | join",
    ],
)
@settings(deadline=None, max_examples=examples(30))  # some ms each, of each template
@given(HOSTILE_TEXT.map(lambda text: text + "<|im_xstart|>"))
def test_content_stays_literal_through_operations(expression: str, content: str) -> None:
    template = ChatTemplate("{{ " + expression + " }}", control_names=VOCABULARY.control_names)
    tokens = encode(template, [{"role": "user", "content": content}])
    own = VOCABULARY.control_names["<|im_end|>"]
    assert {t for t in tokens if t in VOCABULARY.control} <= {own}
    if own in tokens:
        assert "join('<|im_end|>')" in expression


def test_templates_compare_content_as_it_is() -> None:
    source = "{{ messages[0].content == '</think>' }}{{ '<' in messages[0].content }}{{ messages[0].content | length }}"
    template = ChatTemplate(source, control_names=VOCABULARY.control_names)
    assert template.render([{"role": "user", "content": "</think>"}]).text == "TrueTrue8"


@pytest.mark.parametrize("code", [0xDC00, 0xDC05, 0xD800, 0xDFFF])
def test_stand_ins_in_a_message_are_rejected(code: int) -> None:
    character = chr(code)
    for message in ({"role": "user", "content": f"a{character}"}, {"role": f"{character}", "content": ""}):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            COMPILED["chatml"].render([message])


def nested_loops(depth: int) -> str:
    return "{% for a in messages %}" * depth + "x" + "{% endfor %}" * depth


@pytest.mark.parametrize(
    "source",
    [
        nested_loops(30),
        nested_loops(2000),
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% if",
        "{{ 1 | nothing }}",
        "x" * (1 << 20),
        "{{ " + "-" * 100_000 + "1 }}",
    ],
)
def test_a_template_that_cannot_be_compiled_fails_only_chats(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequest, match="template is not valid") as failed:
        template.render([])
    assert failed.value.param == "model"


@pytest.mark.parametrize(
    "source",
    [
        nested_loops(10),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 999999999) }}",
        "{{ 'a'.center(9999999999) }}",
        "{{ 'a'.ljust(9999999999) | length }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a' | indent(9999999999, true) }}",
        "{{ lipsum(99999) }}",
        "{{ [1] | batch(9999999999, 1) | list }}",
        "{{ [1] * 9999999999 }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(9) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(9) %}{% set n.x = n.x|replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(9) %}{% set n.x = n.x.join(n.x|list) %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(9) %}{% set n.x = n.x|list|join(n.x) %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{% set x = 'a' * 1000000 %}{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
        "{% set n = namespace(l=[]) %}{% for i in range(9999)%}{% set n.l = n.l + [('a' * 1000000)[1:]] %}{% endfor %}",
        "{{ (5).to_bytes(9999999999, 'big') }}",
        "{{ strftime_now('%999999999d') }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_a_rendering_is_bounded(source: str) -> None:
    tracemalloc.start()
    begin = time.thread_time()
    try:
        template = ChatTemplate(source)
        with pytest.raises(InvalidRequest):
            template.render([{"role": "user", "content": "a"}] * 20)
        assert tracemalloc.get_traced_memory()[1] < 4 * template_budget.MAX_CHARACTERS
    finally:
        tracemalloc.stop()
    assert time.thread_time() - begin < 15.0  # 1.6 s on a core that has other work; without bounds, minutes


SLOW = {
    "words of a title": "{{ ('ab ' * 20000000) | title | length }}",
    "words counted": "{{ ('ab ' * 20000000) | wordcount }}",
    "words split": "{{ ('ab ' * 20000000).split() | length }}",
    "characters split": "{{ ('ab' * 20000000).split('a') | length }}",
    "lines split": "{{ ('ab\\n' * 20000000).splitlines() | length }}",
    "a key for each character": "{{ ('ab' * 20000000) | max }}",
    "a key for each element": "{{ ([1] * 6000000) | min }}",
    "sorted": "{{ ('ab' * 2000000) | list | sort | length }}",
    "grouped": "{{ ([{'a': 1}] * 3000000) | groupby('a') | length }}",
    "attributes without a call": "{{ 2 in (([{'a': 1}] * 6000000) | map(attribute='a')) }}",
    "all elements weighed": "{{ ([1] * 9000000) | string | length }}",
    "searched from the right": "{{ ('a' * 20000000).rfind('a' * 1000000 ~ 'b' ~ 'a' * 1000000) }}",
    "cut from the right": "{{ ('a' * 20000000).rsplit('a' * 1000000 ~ 'b' ~ 'a' * 1000000) | length }}",
    "stripped of many": "{{ ('a' * 20000000).strip('b' * 20000000 ~ 'a') | length }}",
    "trimmed of many": "{{ ('a' * 20000000) | trim('b' * 20000000 ~ 'a') | length }}",
    "compared": "{{ ([1] * 1000000 + [2]) in [[1] * 1000000 + [3]] * 1000000 }}",
    "texts compared": "{{ ('a' * 9000000 ~ 'b') in ['a' * 9000000 ~ 'c'] * 1000000 }}",
}


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_one_operation_is_bounded(source: str) -> None:
    """Each runs in one piece of Python's or Jinja's own code, where nothing looks at the clock before its end."""
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match="within its limits"):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])
    assert time.thread_time() - begin < 15.0  # three renderings: two look for a system role


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a b c'.split() | length }} {{ 'x-y-z'.rsplit('-', 1) | first }} {{ '--a-'.strip('-') }}", "3 x-y a"),
        ("{{ messages | map(attribute='role') | list }} {{ 'user' in messages | map(attribute='role') }}", None),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | first).content }}", "hi"),
        ("{{ [3, 1, 2] | sort }} {{ 'hello world' | title }} {{ [1, 2] == [1, 2] and 1 < 2 < 3 }}", None),
        (
            "{{ undefined_name == 1 }} {{ missing in ['a'] }} {{ messages[0].content not in 'ohio' }}",
            "False False False",
        ),
        (
            "{{ 5 | title }} {{ 5 | wordcount }} {{ range(3) | map('string') | max }} {{ [1, 2] is eq [1, 2] }}",
            "5 1 2 True",
        ),
        ("{{ messages | groupby('role') | length }} {{ {'b': 1, 'a': 2} | dictsort }}", "1 [('a', 2), ('b', 1)]"),
    ],
)
def test_counted_operations_have_jinjas_values(source: str, expected: str | None) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = ImmutableSandboxedEnvironment().from_string(source).render(messages=messages)
    assert expected is None or plain == expected
    assert ChatTemplate(source).render(messages).text == plain


def test_a_failed_rendering_does_not_affect_the_next() -> None:
    template = ChatTemplate("{{ messages[0].content * messages[0].n }}")
    with pytest.raises(InvalidRequest, match="within its limits"):
        template.render([{"content": "a", "n": 1 << 40}])
    assert template.render([{"content": "b", "n": 2}]).text == "bb"


OPERANDS = ["'a'", "'<b>'", "x", "1", "2.5", "[1]", "'<' | e", "none", "missing"]


@given(st.lists(st.sampled_from(OPERANDS), min_size=3, max_size=6))
def test_a_sum_of_many_operands_is_as_from_left_to_right(operands: list[str]) -> None:
    """A chain of `+` is computed in one piece; values, types and errors are those of Jinja."""
    source = "{{ " + " + ".join(operands) + " }}"
    plain = ImmutableSandboxedEnvironment().from_string(source)
    try:
        expected: str | None = plain.render(x="y<")
    except Exception:
        expected = None
    template = ChatTemplate(source, control_names={"<|im_start|>": 1})
    try:
        found: str | None = template.render([], variables={"x": "y<"}).text
    except InvalidRequest:
        found = None
    assert found == expected


@given(st.lists(st.text("a<|>\u00e9\u4e00\U0001f600", max_size=6), max_size=6))
def test_marks_are_removed_from_pieces_as_from_the_whole(texts: list[str]) -> None:
    marks = TemplateMarks({"<|a|>": 1, "\u00e9>": 2})
    pieces = [marks.mark(text) for text in texts]
    text, positions = marks.remove(pieces)
    assert text == "".join(texts)
    assert marks.remove(["".join(pieces)]) == (text, positions)
    assert positions == {i for i, (a, b) in enumerate(zip("".join(pieces), text, strict=True)) if a != b}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, ""),
        (LLAMA3, ""),
        (MISTRAL, "generic"),
        (CHATML_TOOLS, "generic"),
        ("{% if tools %}{{ '<tool_call>' }}{% endif %}", "hermes"),
        ("{% if tools %}{{ '<tool_call>\n<function=' }}{% endif %}", "qwen3_coder"),
        (
            "{% if tools %}{{ 'Respond with <|tool_call|> followed by a JSON list of tools used.' }}{% endif %}",
            "granite",
        ),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}<|python_tag|>", "llama3"),
        ("{% for tool in tools %}[AVAILABLE_TOOLS]{% endfor %}[TOOL_CALLS]", "mistral"),
        ("{{ '<tool_call>' }}", ""),
        ("{% if tools %}", ""),  # not valid
    ],
)
def test_the_format_of_tool_calls_follows_from_the_template(source: str, expected: str) -> None:
    assert ChatTemplate(source).tool_format == expected


@pytest.mark.parametrize("value", ["none", "false", "[]", "''"])
@pytest.mark.parametrize("work", ["map('upper')", "select", "reject", "selectattr('name')", "rejectattr('name')"])
def test_filters_take_what_is_false_for_an_empty_list(work: str, value: str) -> None:
    """As in Jinja: `tools` and `documents` are none where a request has none."""
    source = "{{ (" + value + " | " + work + " | list) | length }}{{ messages[0]['content'] }}"
    assert ChatTemplate(source, "<s>", "</s>").render([{"role": "user", "content": "x"}]).text == "0x"
