"""What selects text in a template matches that of messages and its own, and makes no control token of a message."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InvalidRequest
from stages.tokenizer import template_budget
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.template_budget import VISITED
from stages.tokenizer.template_marks import TemplateMarks
from stages.tokenizer.template_names import SELECTING_METHODS
from stages.tokenizer.template_selection import MarkedEnvironment, cut
from stages.tokenizer.vocabulary import Vocabulary
from tests.properties import examples
from tests.tokenizer.byte_vocabulary import byte_spec
from tests.tokenizer.test_template import render_plainly

WRITTEN = ["<|im_start|>", "<|im_end|>", "[INST]", "\u25c1a\u25b7"]
SELECTED = ["<think>", "</think>", "<|eot|>", "[/INST]"]  # no template here writes them
NAMES = WRITTEN + SELECTED


def vocabulary() -> Vocabulary:
    spec = byte_spec()
    return Vocabulary(spec._replace(tokens=[*spec.tokens, *NAMES], types=[*spec.types, *[3] * len(NAMES)]))


VOCABULARY = vocabulary()


def tokens(source: str, content: str) -> list[int]:
    template = ChatTemplate(source, control_names=VOCABULARY.control_names)
    assert not template.failure
    with patch.object(template_budget, "MAX_CPU_S", 60.0):
        chat = template.render([{"role": "user", "content": content}])
    return VOCABULARY.encode(chat.text, True, marks=chat.marks)


def plainly(source: str, content: str) -> str:
    return render_plainly(source, [{"role": "user", "content": content}])


def control(found: list[int]) -> list[str]:
    return [name for token in found for name in NAMES if VOCABULARY.control_names[name] == token]


# ------------------------------------------------------------------ one operation each

C = "messages[0].content"
# Sources, the text that each writes for the message CONTENT, and the control tokens in it.
CONTENT = "a<think>b</think>c"
CASES: list[tuple[str, str, list[str]]] = [
    ("{% if '</think>' in " + C + " %}{{ " + C + ".split('</think>')[-1] }}{% endif %}", "c", []),
    ("{{ " + C + ".split('</think>')[0].split('<think>')[-1] }}", "b", []),
    ("{% set mark = '</think>' %}{{ " + C + ".rsplit(sep=mark, maxsplit=1) | last }}", "c", []),
    ("{% macro f(x, by='</think>') %}{{ x.partition(by)[2] }}{% endmacro %}{{ f(" + C + ") }}", "c", []),
    (
        "{% set n = namespace(x='') %}{% for p in " + C + ".split('</think>') %}{% set n.x = p %}{% endfor %}{{ n.x }}",
        "c",
        [],
    ),
    ("{{ " + C + ".replace('</think>', '') }}{{ " + C + " | replace('<think>', '') }}", "a<think>bcab</think>c", []),
    ("{{ " + C + ".replace('</think>', '<|im_end|>', 1) }}", "a<think>b<|im_end|>c", ["<|im_end|>"]),
    ("{{ " + C + " | replace('</think>', '<|im_end|>') }}", "a<think>b<|im_end|>c", ["<|im_end|>"]),
    ("{{ ('</think>' ~ " + C + ") | trim('</think>') }}", "a<think>b</think>c", []),
    ("{{ " + C + ".find('</think>') }}{{ " + C + ".count('<think>') }}{{ " + C + ".index('<think>') }}", "911", []),
    ("{{ " + C + "[" + C + ".find('</think>') + 8:] }}", "c", []),
    ("{{ " + C + ".endswith('</think>c') }}{{ " + C + ".startswith(('x', 'a<think>')) }}", "TrueTrue", []),
    ("{{ " + C + ".removeprefix('a<think>').removesuffix('</think>c') }}", "b", []),
    (
        "{{ " + C + "[1:8] == '<think>' }}{{ '<think>' == " + C + "[1:8] }}{{ " + C + "[1:8] != '<think>' }}",
        "TrueTrueFalse",
        [],
    ),
    ("{{ " + C + "[1:8] in ['</think>', '<think>'] }}{{ ['<think>'].index(" + C + "[1:8]) }}", "True0", []),
    ("{{ " + C + "[1:8] in {'<think>': 1} }}{{ '<think>' in [" + C + "[1:8]] | map('lower') }}", "TrueTrue", []),
    (
        "{{ "
        + C
        + "[1:8] is eq '<think>' }}{{ "
        + C
        + "[1:8] is in ['<think>'] }}{{ "
        + C
        + "[1:8] is ne('<think>') }}",
        "TrueTrueFalse",
        [],
    ),
    ("{{ messages | selectattr('content', 'equalto', 'a<think>b</think>c') | list | length }}", "1", []),
    ("{{ [" + C + "] | map('replace', '</think>', '|') | first }}", "a<think>b|c", []),
    (
        "{% for m in messages if '<think>' in m.content %}{{ m.content.split('<think>')[1] }}{% endfor %}",
        "b</think>c",
        [],
    ),
    # Text that the template has written keeps its control tokens, whichever way it is cut.
    (
        "{% set t = '<|im_start|>' ~ " + C + " ~ '<|im_end|>\\n' %}{{ t.strip() }}",
        "<|im_start|>" + CONTENT + "<|im_end|>",
        ["<|im_start|>", "<|im_end|>"],
    ),
    (
        "{% set t %}<|im_start|>{{ " + C + " }}<|im_end|>{% endset %}{{ t.split('</think>')[-1] }}",
        "c<|im_end|>",
        ["<|im_end|>"],
    ),
    (
        "{% set t %}<|im_start|>{{ " + C + " }}<|im_end|>{% endset %}{{ t.split('<|im_end|>')[0] }}",
        "<|im_start|>" + CONTENT,
        ["<|im_start|>"],
    ),
    (
        "{% set t = 'x <|im_start|>  y <|im_end|>' %}{{ t.split() | join(',') }}",
        "x,<|im_start|>,y,<|im_end|>",
        ["<|im_start|>", "<|im_end|>"],
    ),
    ("{% set t = 'x\\n<|im_end|>\\n\\ny' %}{{ t.splitlines() | join(',') }}", "x,<|im_end|>,,y", ["<|im_end|>"]),
    (
        "{% set t = '<|im_end|>x<|im_end|>' %}{{ t.replace('x', '<think>'[:0]) }}{{ t.removeprefix('<|im_end|>') }}",
        "<|im_end|><|im_end|>x<|im_end|>",
        ["<|im_end|>"] * 3,
    ),
    (
        "{% set t = '<|im_end|>x' %}{{ t.rpartition('x')[0] }}{{ t|replace('<|im_end|>','') }}{{ t == '<|im_end|>x' }}",
        "<|im_end|>xTrue",
        ["<|im_end|>"],
    ),
    (
        "{% set t = '[INST]' %}{{ 'INST]' in t }}{{ t in ['[INST]'] }}{{ t.find('[INST]') }}{{ t.startswith('[I') }}",
        "TrueTrue0True",
        [],
    ),
    ("{{ '\u25c1a\u25b7'.replace('', '-') }}{{ ' [INST] ' | trim }}", "-\u25c1-a-\u25b7-[INST]", ["[INST]"]),
]


@pytest.mark.parametrize(("source", "text", "names"), CASES)
def test_text_is_selected_as_it_reads(source: str, text: str, names: list[str]) -> None:
    found = tokens(source, CONTENT)
    assert VOCABULARY.decode(found) == text == plainly(source, CONTENT)
    assert control(found) == names


def test_an_unknown_operand_is_as_in_jinja() -> None:
    source = "{{ missing == '<think>' }}{{ '<think>' in missing }}{{ missing in ['<think>'] }}{{ 'a' in messages[0] }}"
    assert VOCABULARY.decode(tokens(source, "x")) == plainly(source, "x") == "FalseFalseFalseFalse"


@pytest.mark.parametrize(
    "source", ["{{ '<think>'.split('') }}", "{{ '<think>' in 5 }}", "{{ '<think>' | trim('a', 2) }}"]
)
def test_what_jinja_refuses_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        tokens(source, "x")


def test_a_replacement_by_marked_text_is_counted() -> None:
    source = "{% set t = ('<think>' * 1000000) %}{{ t.replace('<think>', t) }}"
    with pytest.raises(InvalidRequest, match="within its limits"):
        tokens(source, "x")
    with pytest.raises(InvalidRequest, match="within its limits"):
        tokens("{{ ('<think>' * 9000000).split('<think>') | length }}", "x")


# ------------------------------------------------------------------ what it costs


def rendered(source: str, **variables: Any) -> tuple[str, int]:
    """The text, and how many characters of the budget it has used."""
    template = ChatTemplate(source, control_names=VOCABULARY.control_names)
    with patch.object(template_budget, "MAX_CPU_S", 60.0):
        chat = template.render([], variables=variables)
    return chat.text, template_budget.MAX_CHARACTERS - template._environment.budget.characters


class Visited(dict[str, int]):
    """A mapping of a client that counts how often all of its keys are visited."""

    n_visits = 0

    def __iter__(self) -> Iterator[str]:
        self.n_visits += 1
        return super().__iter__()


@pytest.mark.parametrize("keys", ["p", "p.keys()"])
@pytest.mark.parametrize("test", ["r in {}", "r is in({})", "r not in {}"])
def test_a_mapping_is_visited_once_for_all_tests_of_a_loop(keys: str, test: str) -> None:
    p = Visited({f"k{i}": i for i in range(2 * VISITED)})
    p["\u00e9"] = 1
    source = "{% for r in required %}{{ '1' if " + test.format(keys) + " else '0' }}{% endfor %}"
    text, used = rendered(source, p=p, required=["k7", "<think>", "\u00e9"] * 40)
    assert text == ("010" if "not" in test else "101") * 40
    assert p.n_visits <= 1 and used < 2 * len(p)


def test_each_rendering_looks_through_the_keys_of_its_own_mappings() -> None:
    template = ChatTemplate("{{ 'k7' in p }}", control_names=VOCABULARY.control_names)
    for _ in range(2):
        p = Visited({f"k{i}": i for i in range(2 * VISITED)})
        assert template.render([], variables={"p": p}).text == "True"
        assert p.n_visits == 1 and not template._environment._known.mappings


def test_only_a_few_mappings_are_remembered() -> None:
    environment = MarkedEnvironment()
    environment.start()
    for _ in range(1000):
        environment._plain_members({f"k{i}": i for i in range(100)})
        environment._plain_members({"k": 1})
    assert 0 < len(environment._known.mappings) <= 64


MARKED_KEYS = [
    "{'<|im_start|>': 1}",
    "{'<|im_start|>': 1}.copy()",
    "{'<|im_start|>': 1}.keys()",
    "{'x': '<|im_start|>'}.values()",
    "{('<|im_start|>', 'x'): 1}.keys() | map('first')",
    "{'x': '<|im_start|>'}.items() | map('last')",
    "dict(p, **{'<|im_start|>': 1})",
    "dict(p, **{'<|im_start|>': 1}).keys()",
]


@pytest.mark.parametrize("keys", MARKED_KEYS)
def test_marked_keys_are_found_as_they_read(keys: str) -> None:
    source = "{% set d = " + keys + " | default('') %}{% set s = '<|im_' ~ 'start|>' %}{{ text in d }}{{ s in d }}"
    if "map" in keys:  # a generator is used up by the first test
        source = "{{ text in " + keys + " }}{{ '<|im_start|>' in " + keys + " }}"
    p = {f"k{i}": i for i in range(2 * VISITED)}
    assert rendered(source, p=p, text="<|im_start|>")[0] == "TrueTrue"


def test_each_visit_of_marked_keys_is_counted() -> None:
    source = "{% set d = dict(p, **{'<|im_start|>': 1}) %}{% for r in required %}{{ r in d }}{% endfor %}"
    p = {f"k{i}": i for i in range(VISITED)}
    costs = [rendered(source, p=p, required=["x"] * n)[1] for n in (1, 11)]
    assert costs[1] - costs[0] >= 10 * len(p)


def test_each_visit_of_the_values_of_a_mapping_is_counted() -> None:
    p = {f"k{i}": "x" for i in range(VISITED)}
    for view in ("p.values()", "p.items()"):
        assert rendered("{{ 'y' in " + view + " }}", p=p)[1] >= len(p)


def nested(item: Any) -> list[Any]:
    flat = [item] * (3 * VISITED)
    return [flat, [[flat]], tuple(flat), [{"a": flat}, flat]]


@pytest.mark.parametrize("values", [*nested("a"), *nested("\u00e9"), *nested(None), *nested(("a", None))])
def test_lists_are_visited_in_counted_parts(values: Sequence[Any]) -> None:
    environment = MarkedEnvironment()
    environment.marks = TemplateMarks(VOCABULARY.control_names)
    for visit in (environment._has_marks, environment._plain):
        if visit == environment._has_marks and any(isinstance(value, dict) for value in values):
            values = [values[-1]]  # marks are not looked for in mappings
        counted: list[int] = []
        with patch.object(environment, "charge", counted.append):
            found = visit(values)
        assert max(counted) <= VISITED and sum(counted) >= 3 * VISITED
        assert not found if visit == environment._has_marks else found is values


def test_a_marked_text_in_a_long_list_is_compared_as_it_reads() -> None:
    source = (
        "{% set long = ['x', 5] * 4096 + ['<|im_start|>'] + ['y'] * 5000 %}"
        "{{ long == given }}{{ (long,) == (given,) }}{{ {'a': long} == {'a': given} }}{{ long is eq given }}"
        "{{ long in [given] }}{{ long[1:] != given }} {{ given.index('<|im_start|>') }} {{ long.index(name) }}"
    )
    given = ["x", 5] * 4096 + ["<|im_start|>"] + ["y"] * 5000
    assert rendered(source, given=given, name="<|im_start|>")[0] == "True" * 6 + " 8192 8192"


@pytest.mark.parametrize(
    "test",
    ["p == 'array'", "p != s", "'array' == p", "p == 1", "1 != p", "p == none", "s.missing != 'x' and p == s.missing"],
)
@pytest.mark.parametrize("p", [[1] * 100_000, [{"a": ["x"] * 50_000}] * 2, {"a": ["\u00e9"] * 100_000}])
def test_a_container_is_not_visited_for_a_text(test: str, p: Any) -> None:
    assert rendered("{{ " + test + " }}", p=p, s="array")[1] < 1000


N_REPLACED = 16 * VISITED


@pytest.mark.parametrize("new", ["", "-", "\udc00"])
def test_a_replacement_in_marked_text_keeps_few_parts_in_memory(new: str) -> None:
    plain = "<" + "abc" * N_REPLACED
    text = "\udc00" + "abc" * N_REPLACED
    counted: list[int] = []
    tracemalloc.start()
    try:
        found = cut(text, plain, "replace", ("a", new), {}, counted.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == "\udc00" + (new + "bc") * N_REPLACED
    assert peak < 5 * len(text) and max(counted) <= VISITED and sum(counted) >= 2 * N_REPLACED - VISITED


@pytest.mark.parametrize("args", [("a", None), ("a", "b", 1.5), ("a", "b", None)])
def test_a_replacement_refuses_what_python_refuses(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        cut("\udc00a", "<a", "replace", args, {}, lambda n: None)


def test_the_slices_of_marked_text_are_counted_beside_the_parts() -> None:
    source = "{% set x = s ~ ('ab' * 10000) %}{{ x.split('a') | length }}"
    texts_and_costs = [rendered("{% set s = '" + s + "' %}" + source) for s in ("<|im_start|>", "_im_start_")]
    assert texts_and_costs[0][0] == texts_and_costs[1][0] == "10002"
    assert texts_and_costs[0][1] - texts_and_costs[1][1] >= template_budget.PART * 10_000


FIRST = 0xE000  # a character for each place of a text


def places(found: str | list[str] | tuple[str, ...]) -> list[int]:
    return [ord(character) - FIRST for character in "".join(found) if character != "-"]


@given(st.text("<>ab \n", max_size=20), st.text("<>ab \n", max_size=2), st.integers(-1, 3))
def test_each_method_takes_the_places_that_it_takes_of_plain_text(plain: str, by: str, n: int) -> None:
    text = "".join(chr(FIRST + place) for place in range(len(plain)))
    for name in sorted(SELECTING_METHODS):
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((by,), {})]
        if name in ("split", "rsplit"):
            calls = [((), {}), ((by,), {}), ((by, n), {}), ((None, n), {}), ((), {"sep": by, "maxsplit": n})]
        elif name == "replace":
            calls = [((by, "-"), {}), ((by, "--", n), {})]
        elif name.endswith("strip"):
            calls = [((), {}), ((by,), {}), ((None,), {})]
        elif name == "splitlines":
            calls = [((), {}), ((True,), {}), ((), {"keepends": True})]
        elif name.startswith("is"):
            calls = [((), {})]
        for args, kwargs in calls:
            try:
                expected: Any = getattr(plain, name)(*args, **kwargs)
            except ValueError:  # an empty separator, or nothing is found
                with pytest.raises(ValueError):
                    cut(text, plain, name, args, kwargs, lambda n: None)
                continue
            found = cut(text, plain, name, args, kwargs, lambda n: None)
            if isinstance(expected, str | list | tuple):
                back = str.maketrans({chr(FIRST + place): character for place, character in enumerate(plain)})
                texts = [found] if isinstance(found, str) else found
                assert [one.translate(back) for one in texts] == (
                    [expected] if isinstance(expected, str) else [*expected]
                )
                assert type(found) is type(expected)
                assert places(found) == sorted(set(places(found)))  # each at most once, in order
            else:
                assert found == expected


# ------------------------------------------------------------------ templates of several operations

NAME, WORD = st.sampled_from(NAMES), st.sampled_from(["x", "user", "\n", "ab"])
OPERAND = NAME | WORD


def literal(text: str) -> str:
    return "'" + text.replace("\n", "\\n") + "'"


BUILT = st.one_of(
    st.just(C),
    st.builds(
        "({} ~ {} ~ {})".format,
        st.sampled_from(WRITTEN).map(literal),
        st.just(C),
        st.sampled_from(WRITTEN).map(literal),
    ),
    st.builds("f({}, {})".format, st.just(C), st.sampled_from(WRITTEN).map(literal)),
    st.sampled_from(WRITTEN).map(literal),
)
STEP = st.one_of(
    st.builds(".split({})[{}]".format, OPERAND.map(literal), st.sampled_from(["0", "-1"])),
    st.builds(".rsplit({}, 1)[0]".format, OPERAND.map(literal)),
    st.builds(".partition({})[{}]".format, OPERAND.map(literal), st.sampled_from(["0", "2"])),
    st.builds(".replace({}, {})".format, OPERAND.map(literal), (st.sampled_from(WRITTEN) | WORD).map(literal)),
    st.builds("|replace({}, {})".format, OPERAND.map(literal), (st.sampled_from(WRITTEN) | WORD).map(literal)),
    st.builds(".removeprefix({})".format, OPERAND.map(literal)),
    st.builds(".removesuffix({})".format, OPERAND.map(literal)),
    st.builds(".strip({})".format, st.just("") | OPERAND.map(literal)),
    st.builds("|trim({})".format, st.just("") | OPERAND.map(literal)),
    st.sampled_from(["[1:]", "[:-1]", "[::1]"]),
)
TEST = st.one_of(
    st.builds("{} in v".format, OPERAND.map(literal)),
    st.builds("v not in [{}, {}]".format, OPERAND.map(literal), OPERAND.map(literal)),
    st.builds("v == {}".format, OPERAND.map(literal)),
    st.builds("v.startswith({})".format, OPERAND.map(literal)),
    st.builds("v is eq {}".format, OPERAND.map(literal)),
    st.builds("{} < v".format, OPERAND.map(literal)),
    st.builds("n.x == v or n.x in v".format),
)
FORMS = [
    "{{% set n = namespace(x={0}) %}}{{% set v = ({0}){1} %}}{{% if {2} %}}{{{{ v }}}}{{% else %}}-{{% endif %}}",
    "{{% set n = namespace(x={0}) %}}{{% for v in [{0}, ({0}){1}] %}}{{{{ v ~ ({2}) }}}}{{% endfor %}}",
    "{{% set n = namespace(x={0}) %}}{{% set v %}}{{{{ ({0}){1} }}}}{{% endset %}}{{{{ v if {2} else n.x }}}}",
]
MACRO = "{% macro f(text, name='<|im_start|>') %}{{ name ~ text ~ name }}{% endmacro %}"


@st.composite
def sources(draw: st.DrawFn) -> str:
    steps = draw(st.lists(STEP, max_size=3))
    value = draw(BUILT)
    chain = ""
    for step in steps:  # a filter ends the expression that a method is called on
        chain = f"{chain}{step}"
        if step.startswith("|"):
            value, chain = f"({value}{chain})", ""
    return MACRO + draw(st.sampled_from(FORMS)).format(value, chain, draw(TEST))


HOSTILE = st.lists(
    st.sampled_from([*NAMES, *(n[1:] for n in NAMES), *(n[:-1] for n in NAMES), "x", "user", "ab", "\n", "\u00e9"]),
    max_size=8,
).map("".join)
HARMLESS = st.lists(st.sampled_from(["x", "user", "ab", "\n", " ", "\u00e9", "b"]), max_size=8).map("".join)


@settings(deadline=None, max_examples=examples(30))
@given(sources(), HOSTILE)
def test_messages_select_and_stay_literal(source: str, content: str) -> None:
    found = tokens(source, content)
    assert VOCABULARY.decode(found) == plainly(source, content)
    assert set(control(found)) <= {name for name in WRITTEN if name in source}


@settings(deadline=None, max_examples=examples(30))
@given(sources(), HARMLESS)
def test_what_the_template_has_written_stays_its_own(source: str, content: str) -> None:
    assert tokens(source, content) == VOCABULARY.encode(plainly(source, content), True)


@settings(deadline=None, max_examples=examples(30))
@given(
    st.lists(STEP.filter(lambda step: not any(name in step.split(",")[-1] for name in WRITTEN)), max_size=3), HOSTILE
)
def test_a_template_that_writes_no_names_writes_no_control_tokens(steps: list[str], content: str) -> None:
    value = C
    for step in steps:
        value = f"({value}{step})"
    source = "{{ " + value + " }}"
    found = tokens(source, content)
    assert not control(found) and VOCABULARY.decode(found) == plainly(source, content)
