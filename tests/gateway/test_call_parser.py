"""Tool calls in a text: the formats, what is not a call, and that the cuts of the text do not matter."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.json_body import MAX_DIGITS, parse_object
from pipeline.api.json_prefix import MAX_DEPTH, JsonValue
from pipeline.api.requests.tool_formats import FORMATS
from pipeline.errors import InvalidRequest
from stages.gateway.tool_calls.call_object import MAX_HEAD, MAX_TEXT
from stages.gateway.tool_calls.call_parser import MAX_SPACE, Arguments, CallBegin, CallEnd, CallParser, Item, Text
from tests.properties import examples

NAMES = {"weather", "sum"}
WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'


def parse(text: str, form: str = "hermes", cuts: tuple[int, ...] = (), *, is_single: bool = False) -> list[Item]:
    """The items of a text that comes in parts, with adjacent texts and arguments joined."""
    parser = CallParser(FORMATS[form], NAMES, is_single)
    items: list[Item] = []
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in zip([0, *ends], ends):
        items += parser.feed(text[begin:end])
    items += parser.finish()
    joined: list[Item] = []
    for item in items:
        if joined and isinstance(item, Text | Arguments) and type(joined[-1]) is type(item):
            joined[-1] = type(item)(joined[-1][0] + item.text)  # type: ignore[operator]
        else:
            joined.append(item)
    assert parser.n_calls == sum(isinstance(item, CallBegin) for item in joined)
    return joined


def call(name: str, arguments: str) -> list[Item]:
    return [CallBegin(name), Arguments(arguments), CallEnd(True, arguments)]


PARIS = call("weather", '{"city": "Paris"}')
ROME = call("weather", '{"city":"Rome","days":[1,2]}')
SUM = call("sum", "{}")

CALLS: list[tuple[str, str, list[Item]]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", PARIS),
    ("hermes", f"I look.\n\n<tool_call>{WEATHER}</tool_call>\n", [Text("I look."), *PARIS]),
    ("hermes", f"<tool_call>{WEATHER}</tool_call> \nDone.\n", [*PARIS, Text("Done.\n")]),
    ("hermes", f"<tool_call>{WEATHER}", PARIS),  # a stop string can cut off the closing tag
    ("hermes", f"<tool_call>{WEATHER}</tool_c", PARIS),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}\n</tool_call>', PARIS),  # a brace missing
    (
        "hermes",
        f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"arguments":{{}}, "name":"sum"}}</tool_call>',
        [*PARIS, *SUM],
    ),
    ("hermes", '<tool_call>{"name": "sum"}</tool_call>', SUM),
    ("hermes", '<tool_call>{"id": [1, {"name": 2}], "name": "sum", "arguments": {}, "x": 1.5}</tool_call>', SUM),
    ("llama3", WEATHER.replace("arguments", "parameters"), PARIS),
    ("llama3", f"\n<|python_tag|>{WEATHER}; {WEATHER}", [*PARIS, *PARIS]),
    ("llama3", f'{WEATHER}\n{{"type": "function", "function": "sum", "parameters": {{}}}}', [*PARIS, *SUM]),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}]", PARIS),
    ("mistral", f'[TOOL_CALLS][{WEATHER}, {{"name": "sum", "arguments": {{}}}}]\n', [*PARIS, *SUM]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city":"Rome","days":[1,2]}[TOOL_CALLS]sum{}', [*ROME, *SUM]),
    ("mistral", "Yes[TOOL_CALLS]sum[CALL_ID]a1B2[ARGS] {}", [Text("Yes"), *SUM]),
    ("generic", f"<tool_call>{WEATHER}</tool_call>", PARIS),
    ("generic", f"[TOOL_CALLS][{WEATHER}]", PARIS),
    ("generic", WEATHER, PARIS),
    *(
        (
            form,
            f"{begin}{{calls}}{end}".format(calls=f'[{WEATHER}, {{"name": "sum", "arguments": {{}}}}]'),
            [*PARIS, *SUM],
        )
        for form, begin, end in (
            ("granite", "", ""),
            ("granite", "\n <|tool_call|>", "\n"),
            ("granite", "<tool_call>", "</tool_call>"),
            ("generic", "<|tool_call|>", "<|/tool_call|>"),
            ("generic", "", ""),
            ("llama3", " ", " "),
        )
    ),
    ("hermes", f'<tool_call>{{"id": 1, "type": "function", "function": {WEATHER}}}</tool_call>', PARIS),
    ("hermes", f'<tool_call>{{"function": {WEATHER}, "index": {{}}}}</tool_call>\n', PARIS),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "sum"}}</tool_call>', SUM),
    ("hermes", '<tool_call>{"name": "sum", "function": {"x": {}}, "arguments": {}}</tool_call>', SUM),
    ("llama3", f'{{"type": "function", "function": {WEATHER}}}; {{"function": {WEATHER}}}', [*PARIS, *PARIS]),
    ("granite", f'[{{"type": "function", "function": {WEATHER}}}, {{"function": {WEATHER}}}]', [*PARIS, *PARIS]),
    ("hermes", '<tool_call>{"name": "sum", "arguments": null}</tool_call>', SUM),
    ("hermes", '<tool_call>{"arguments": null, "name": "sum"}</tool_call>', SUM),
    ("hermes", '<tool_call>{"name": "sum", "arguments": " "}</tool_call>', SUM),
    *(
        (form, f'{begin}{{"name": "weather", "{key}": {json.dumps(" " + text)}}}{end}', call("weather", text))
        for text in ('{"city": "Pa\\nris \\u00e4\\ud83d\\udc26"}', json.dumps({"city": 'ä"x' * 1500}))
        for form, begin, key, end in (
            ("hermes", "<tool_call>", "arguments", "</tool_call>"),
            ("llama3", "", "parameters", ""),
        )
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"arguments": "{\\"city\\": \\"a\nb\\"}", "name": "weather"}]',
        call("weather", '{"city": "a\\nb"}'),
    ),
    ("granite", f"I look.\n<|tool_call|>[{WEATHER}]<|/tool_call|> Done.", [Text("I look."), *PARIS, Text("Done.")]),
    *(
        (form, f"{begin}{call_text}{end}", call("weather", '{"city": "a\\nb\\t\\u0001"}'))
        for call_text in ('{"name": "weather", "arguments": {"city": "a\nb\t\x01"}}',)
        for form, begin, end in (("hermes", "<tool_call>", "</tool_call>"), ("mistral", "[TOOL_CALLS][", "]"))
    ),
    ("mistral", '[TOOL_CALLS]weather{"city": "a\nb"}', call("weather", '{"city": "a\\nb"}')),
    ("hermes", '<tool_call>{"id": "a\nb", "name": "sum", "arguments": {}, "x": "\n"}</tool_call>', SUM),
    *(
        ("hermes", f'<tool_call>{{"name": "sum", "arguments": {arguments}}}</tool_call>', call("sum", arguments))
        for arguments in (
            f'{{"x": -{"1" * 80}.{"2" * 80}e+{"0" * 80}1}}',
            f'{{"x": {"1" * MAX_DIGITS}}}',
            f'{{"x": {"[" * (MAX_DEPTH - 1)}{"]" * (MAX_DEPTH - 1)}}}',
        )
    ),
]


@pytest.mark.parametrize(("form", "text", "expected"), CALLS)
def test_calls(form: str, text: str, expected: list[Item]) -> None:
    assert parse(text, form) == expected
    assert parse(text, form, tuple(range(1, len(text)))) == expected


NO_CALLS = [
    ("hermes", "Hello, <b>world</b>.\n"),
    ("hermes", " \n "),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\nnot JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "sum", "arguments": "[]"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "sum", "arguments": "{} {}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "sum", "arguments": "{\\"a\\": 1"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "sum", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "sum", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"function": {"function": {"name": "sum"}}}</tool_call>'),
    ("llama3", '{"function": {"name": "sum", "city": {}}}'),
    ("llama3", '{"function": {"name": "unknown", "arguments": {}}}'),
    ("hermes", '<tool_call>{"name": "sum", "arguments": nul}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather" "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "argum'),
    ("hermes", WEATHER),  # without the tag
    ("hermes", "a <tool_call <tool_cal"),
    ("llama3", '{"answer": {"name": "weather", "parameters": {}}}'),
    ("llama3", '{"name": "weather"}'),
    ("llama3", f"Like this: {WEATHER}"),
    ("llama3", "<|python_tag|>weather.call(city='Paris')"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]weather and more"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]!"),
    ("generic", '{"city": "Paris"}'),
    ("generic", '[1, {"name": "weather"}]'),
    ("granite", "[link](https://example.org) and more"),
    ("granite", f"Like this: [{WEATHER}]"),
    ("granite", '[ {"city": "Paris"}]'),
    ("granite", "[]"),
    ("hermes", f"[{WEATHER}]"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_not_a_call_comes_back_as_text(form: str, text: str) -> None:
    assert parse(text, form) == [Text(text)]
    assert parse(text, form, tuple(range(1, len(text)))) == [Text(text)]


def test_a_text_is_not_held_back() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES)
    assert parser.feed("Hello") == [Text("Hello")]
    assert parser.feed(" world <") == [Text(" world")]
    assert parser.feed("b>") == [Text(" <b>")]


def test_arguments_are_not_held_back() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES)
    assert parser.feed('<tool_call>{"name": "weather", "argu') == []
    assert parser.feed('ments": {"ci') == [CallBegin("weather"), Arguments('{"ci')]
    assert parser.feed('ty": "P') == [Arguments('ty": "P')]
    assert parser.feed('aris"}') == [Arguments('aris"}'), CallEnd(True, '{"city": "Paris"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


def test_arguments_that_stop_being_json_end_the_call() -> None:
    items = parse('<tool_call>{"name": "weather", "arguments": {"days": 2, "city": Paris}}</tool_call>')
    assert items == [
        CallBegin("weather"),
        Arguments('{"days": 2, "city": '),
        CallEnd(False, '{"days": 2}'),
        Text("Paris}}</tool_call>"),
    ]


@pytest.mark.parametrize("cuts", [(), tuple(range(1, 200))])
def test_a_broken_call_does_not_end_an_answer_of_a_single_call(cuts: tuple[int, ...]) -> None:
    """What follows is text to the end: the call is not complete, and there is no second one."""
    text = f'<tool_call>{{"name": "weather", "arguments": {{"city": Paris}}}}</tool_call><tool_call>{WEATHER}'
    parser = CallParser(FORMATS["hermes"], NAMES, is_single=True)
    parser.feed(text)
    assert not parser.is_over
    assert parse(text, cuts=cuts, is_single=True) == [
        CallBegin("weather"),
        Arguments('{"city": '),
        CallEnd(False, "{}"),
        Text(f"Paris}}}}</tool_call><tool_call>{WEATHER}"),
    ]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("mistral", f"[TOOL_CALLS][{WEATHER}, ", PARIS),
        ("mistral", f"[TOOL_CALLS][{WEATHER},", PARIS),
        ("mistral", f'[TOOL_CALLS][{WEATHER}, {{"name": "su', [*PARIS, Text('{"name": "su')]),
        ("granite", f"[{WEATHER},\n", PARIS),
        ("llama3", f"{WEATHER};", PARIS),
        ("llama3", f"{WEATHER} ; ", PARIS),
        ("llama3", f"{WEATHER}; or so", [*PARIS, Text("; or so")]),
    ],
)
def test_a_separator_of_calls_is_no_text_where_the_answer_ends(form: str, text: str, expected: list[Item]) -> None:
    assert parse(text, form) == expected
    assert parse(text, form, tuple(range(1, len(text)))) == expected


def test_a_call_that_is_cut_off_has_what_there_is_of_its_arguments() -> None:
    items = parse('<tool_call>{"name": "weather", "arguments": {"a": {"b": [1, 2, "x')
    assert items == [CallBegin("weather"), Arguments('{"a": {"b": [1, 2, "x'), CallEnd(False, '{"a": {"b": [1, 2]}}')]


@pytest.mark.parametrize(("form", "text", "expected"), CALLS)
def test_a_single_call_ends_the_answer(form: str, text: str, expected: list[Item]) -> None:
    end = next(index for index, item in enumerate(expected) if isinstance(item, CallEnd))
    assert parse(text, form, is_single=True) == expected[: end + 1]


@pytest.mark.parametrize(
    ("form", "begin", "filler"),
    [
        ("hermes", '<tool_call>{"x": "', "a"),
        ("hermes", '<tool_call>{"arguments": {"x": "', "a"),
        ("hermes", "<tool_call>", " "),
        ("hermes", "", "\n"),
        ("generic", "[", " "),
        ("hermes", "", "<tool_call>"),
        ("hermes", "", '<tool_call>{"name": "weather",'),
        ("generic", "{", " "),
        ("mistral", "[TOOL_CALLS]", "a"),
        ("mistral", "[TOOL_CALLS]weather", " "),
        ("mistral", "[TOOL_CALLS]weather[CALL_ID]", "a"),
    ],
)
def test_what_is_held_back_is_bounded(form: str, begin: str, filler: str) -> None:
    parser = CallParser(FORMATS[form], NAMES)
    n_fed = n_out = 0
    for part in [begin, *[filler] * (9_000 // len(filler))]:
        n_fed += len(part)
        n_out += sum(len(item.text) for item in parser.feed(part) if isinstance(item, Text))
        assert n_fed - n_out <= MAX_HEAD + MAX_SPACE + 64
    assert n_fed == n_out + sum(len(item.text) for item in parser.finish() if isinstance(item, Text))


def test_a_string_of_arguments_is_held_back_up_to_its_bound() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES)
    begin = '<tool_call>{"name": "sum", "arguments": "'
    assert parser.feed(begin + "a" * (MAX_TEXT - 100)) == []
    assert parser.feed("a" * 200) == [Text(begin + "a" * (MAX_TEXT + 100))]


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        f"[{WEATHER}",
        '[ {"name": "sum"',
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]a1",
        "[",
        "]",
        ",",
        ";",
    ),
    *(
        '{"name": "weather"',
        '"arguments": {"a": 1}',
        '"arguments": {',
        '"arguments": "{\\"a\\": \\"\\\\n\n\\"}"',
        '"arguments": "{\\"a',
        f'{{"function": {WEATHER}',
        '"function": {"name": "sum", ',
        '"parameters": null',
        '"parameters": {}',
        '{"name": "sum"',
        '"name": ',
    ),
    *(
        WEATHER,
        '{"name":"sum","parameters":{"x":"\\u00e4\\n"}}',
        "weather",
        "sum",
        "{}",
        "{",
        "}",
        '"',
        "\\",
        '{"name": "weather", "arguments": {"city": "a\n\x01',
        '{"name": "weather", "arguments": {"a\nb": ["\t", 1',
        "1.5e3",
        "-",
    ),
    *(" ", "\n", "\t" * 5, " " * 200, "Hello", "ä🐦", "true", "nul", ":", "<", "<tool", "[TOOL"),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)
forms = st.sampled_from(sorted(FORMATS))


@settings(max_examples=examples(30))
@given(texts, forms, st.lists(st.integers(1, 400), max_size=20), st.booleans())
def test_the_cuts_of_a_text_do_not_matter(text: str, form: str, cuts: list[int], is_single: bool) -> None:
    whole = parse(text, form, is_single=is_single)
    assert parse(text, form, tuple(cuts), is_single=is_single) == whole
    assert parse(text, form, tuple(range(1, len(text))), is_single=is_single) == whole


@given(texts, forms)
def test_items_are_well_formed(text: str, form: str) -> None:
    items = parse(text, form)
    if not any(isinstance(item, CallBegin) for item in items):
        assert "".join(item.text for item in items if isinstance(item, Text)) == text
    arguments = None
    for item in items:
        if isinstance(item, CallBegin):
            assert item.name in NAMES
            assert arguments is None
            arguments = ""
        elif isinstance(item, Arguments):
            assert arguments == ""
            arguments = item.text
        elif isinstance(item, CallEnd):
            assert isinstance(json.loads(item.closed), dict)
            if item.is_complete:
                assert item.closed == arguments
            arguments = None
        else:
            assert arguments is None
            assert item.text
    assert arguments is None


# ------------------------------------------------------------------ JSON


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return False
    return True


def take(text: str) -> JsonValue:
    """The value of all of `text`, followed by a character that belongs to no value."""
    value = JsonValue()
    end = value.feed(text, 0, len(text))
    if end < len(text):
        value.is_bad = True
    value.feed("\n", 0, 1)
    return value


values: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, False, "", '"\\/ä\n', "x", 0, -17, 10**12, 0.5, -2.5e-7, 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(values, st.booleans(), st.booleans())
def test_json_is_accepted(value: Any, is_ascii: bool, is_wide: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=1 if is_wide else None)
    taken = take(text)
    assert taken.is_complete
    assert not taken.is_bad


@given(values, st.data())
def test_changed_json_is_accepted_where_it_is_json(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    new = data.draw(st.sampled_from('{}[]",:\\ue0.-+1tn \n'))
    text = text[:at] + new + text[at + data.draw(st.integers(0, 1)) :]
    text = text.strip(" \n")
    taken = take(text)
    assert (taken.is_complete and not taken.is_bad) == is_json(text)


@given(values, st.data())
def test_a_value_that_is_cut_off_can_be_closed(value: Any, data: st.DataObject) -> None:
    text = json.dumps({"a": value})
    cut = text[: data.draw(st.integers(1, len(text)))]
    prefix = JsonValue()
    assert prefix.feed(cut, 0, len(cut)) == len(cut)
    assert isinstance(json.loads(prefix.closed(cut)), dict)


def test_depth_is_bounded() -> None:
    assert take("[" * MAX_DEPTH + "]" * MAX_DEPTH).is_complete
    assert take("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)).is_bad


@pytest.mark.parametrize(
    "number",
    [
        *("1" * MAX_DIGITS, "1" * (MAX_DIGITS + 1), f"-0.{'1' * (MAX_DIGITS - 3)}", f"-0.{'1' * (MAX_DIGITS - 2)}"),
        *("1e308", "-1e309", "1e-400", f"1e{'0' * (MAX_DIGITS - 3)}1", f"1e{'0' * MAX_DIGITS}1", "1.5e999"),
    ],
)
def test_a_body_may_have_the_same_numbers(number: str) -> None:
    """An answer with others could not be sent back."""
    try:
        parse_object(f'{{"x":{number}}}'.encode())
    except InvalidRequest:
        assert take(f"[{number}]").is_bad
    else:
        assert take(f"[{number}]").is_complete


@given(st.text(alphabet='a"\\\n\t\r\x00\x1f{ä', max_size=12), st.lists(st.integers(1, 12), max_size=4))
def test_control_characters_in_strings_are_escaped_on_demand(text: str, cuts: list[int]) -> None:
    """Strings that Python's lenient reader takes: the output is strict JSON of the same value, and so is its end."""
    whole = f'{{"{text}": ["{text}",\n1'
    value, output = JsonValue(escapes_controls=True), ""
    ends = [*sorted({cut for cut in cuts if cut < len(whole)}), len(whole)]
    for begin, end in zip([0, *ends], ends):
        at = value.feed(whole, begin, end)
        output += value.take_output()
        if at < end:
            break
    closed = json.loads(value.closed(output))
    try:
        expected = json.loads(whole + "]}", strict=False)
    except ValueError:
        return
    assert not value.is_bad
    assert json.loads(output + "]}") == expected
    assert closed == {key: value[:1] for key, value in expected.items()}
