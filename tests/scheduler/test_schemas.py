"""Schemas that the library refuses or misreads as they are: masks allow what they allow, after they are rewritten."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.constraint_fields import read_schema
from pipeline.api.plain_schema import FORMATS
from stages.scheduler.constraints import grammar
from tests.properties import examples

from .test_grammar import matcher_of, tokenizer, walk


def accepts(matcher: Any, value: Any) -> bool:
    """`value`: JSON text, or what it stands for."""
    tokens, fresh = [*(value if isinstance(value, str) else json.dumps(value)).encode()], matcher.deep_copy()
    return fresh.try_consume_tokens(tokens) == len(tokens) and bool(fresh.is_accepting())


TEXT = {"type": "string"}
NO_EFFECT: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "propertyNames": ({"propertyNames": TEXT, "additionalProperties": {"type": "null"}}, [{"a": None}], [{"a": 1}]),
    "uniqueItems": ({"type": "array", "uniqueItems": False, "items": {"type": "null"}}, [[None, None]], [[1]]),
    "dependencies": ({"dependencies": {}, "properties": {"a": TEXT}}, [{"a": "x"}, {}], [{"a": 1}]),
    "never": ({"properties": {"a": {"not": {}}, "b": TEXT}}, [{"b": "x"}, {}], [{"a": 1}, {"a": "x"}]),
    "unevaluated": ({"properties": {"a": TEXT}, "unevaluatedProperties": False}, [{"a": "x"}, {}], [{"b": "x"}]),
    "evaluated": ({"additionalProperties": TEXT, "unevaluatedProperties": False}, [{"a": "x"}], [{"a": 1}]),
    **{
        form: ({"properties": {"a": {"type": "string", "format": form, "maxLength": 9}}}, [{"a": "x/1"}], [{"a": 1}])
        for form in ("password", "binary", "path", "regex", "base64", "byte", "uri-reference")
    },
}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_keywords_that_restrict_nothing_are_no_reason_to_refuse(name: str) -> None:
    given, valid, invalid = NO_EFFECT[name]
    schema = {"type": "object", **given}
    matcher, validator = matcher_of("json_schema", json.dumps(schema)), jsonschema.Draft202012Validator(schema)
    for value in valid:
        validator.validate(value)
        assert accepts(matcher, value)
    assert not any(accepts(matcher, value) for value in invalid)
    for seed in range(10):
        text, has_ended = walk(matcher.deep_copy(), seed)
        if has_ended:
            validator.validate(json.loads(text))


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_the_formats_that_are_kept_are_those_of_the_library(form: str) -> None:
    assert matcher_of("json_schema", json.dumps({"type": "string", "format": form}))


WIDE: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "float32": (
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        [0, -1.5, 8 * 10**18, "-9000000000000000000", "0." + "1" * 40],
        ["1" + "0" * 39, '"a"'],
    ),
    "float64": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        [0.25, "123456789012345678"],
        ["1" * 400],
    ),
    "sextillion": ({"type": "number", "maximum": 1e21}, [-1e3, 7, "-1" + "0" * 30], ["1" + "0" * 22]),
    "int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, 2**63 - 1, 1024 - 2**63],
        [2**63, -(2**63) - 1, "1.5"],
    ),
    "exclusive int64": ({"type": "integer", "exclusiveMaximum": 2**63 - 1}, [2**63 - 1024], [2**63 - 1]),
    "int64 or null": ({"type": ["integer", "null"], "minimum": -(2**63)}, [None, -5, 2**64], [-(2**63) - 1]),
    "safe integers": ({"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1}, [2**53 - 1], [2**53]),
    "a wide constant": ({"const": 1e20, "maximum": 1e21}, ["1" + "0" * 20], [0]),
    "a wide integer of a list": ({"enum": [1, -(10**19)], "minimum": -(10**20)}, [1, -(10**19)], [2]),
    "a list": ({"type": "integer", "enum": [1, 2], "minimum": -(2**63), "maximum": 2**63 - 1}, [1, 2], [3]),
    "or text": ({"type": ["integer", "string"], "minimum": 1e21}, ['"a"'], [2**63 - 1, 1]),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_bounds_of_numbers_are_kept(name: str) -> None:
    schema, valid, invalid = WIDE[name]
    matcher, validator = matcher_of("json_schema", json.dumps(schema)), jsonschema.Draft202012Validator(schema)
    for value in valid:
        validator.validate(json.loads(value) if isinstance(value, str) else value)
        assert accepts(matcher, value if isinstance(value, str) else json.dumps(value)), value
    assert not any(accepts(matcher, value) for value in invalid)


BOUNDS = st.integers(-(1 << 70), 1 << 70) | st.builds(
    lambda power, offset, sign: sign * (2**power + offset),
    st.integers(46, 80),
    st.integers(-3, 3),
    st.sampled_from([-1, 1]),
)


@given(
    st.sampled_from(["integer", "number", ["integer", "null"]]),
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        BOUNDS | BOUNDS.map(float),
        min_size=1,
        max_size=2,
    ),
)
@settings(max_examples=examples(30))
def test_no_number_beyond_its_bounds_is_allowed(kind: Any, bounds: dict[str, Any]) -> None:
    schema = {"type": kind, **bounds}
    try:
        matcher = matcher_of("json_schema", json.dumps(schema))
    except grammar.GrammarError:
        return  # no number, or none that the library can write
    validator = jsonschema.Draft202012Validator(schema)
    for bound in (*bounds.values(), 2**63, -(2**63)):
        for value in range(int(bound) - 2, int(bound) + 3):
            assert validator.is_valid(value) or not accepts(matcher, value)
    for seed in range(2):
        text, has_ended = walk(matcher.deep_copy(), seed)
        assert not has_ended or validator.is_valid(json.loads(text))


PETS = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": dict.fromkeys(("cat", "dog", "puppy"), "#/$defs/Cat")},
}
OWNER = {  # of Pydantic: a tag with a default is not required
    "$defs": {
        "Cat": {
            "properties": {
                "kind": {"const": "cat", "default": "cat", "title": "Kind", "type": "string"},
                "lives": {"maximum": 9, "minimum": 0, "title": "Lives", "type": "integer"},
                "friends": {"default": [], "items": PETS, "title": "Friends", "type": "array"},
            },
            "required": ["lives"],
            "title": "Cat",
            "type": "object",
        },
        "Dog": {
            "properties": {
                "kind": {"default": "dog", "enum": ["dog", "puppy"], "title": "Kind", "type": "string"},
                "name": {"maxLength": 5, "title": "Name", "type": "string"},
            },
            "required": ["name"],
            "title": "Dog",
            "type": "object",
        },
    },
    "properties": {
        "pet": {**PETS, "title": "Pet"},
        "first": {"anyOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}], "default": None},
    },
    "required": ["pet"],
    "title": "Owner",
    "type": "object",
}


def test_a_discriminated_union_of_pydantic_is_kept() -> None:
    matcher, ended = grammar.new_matcher(tokenizer(), read_schema(OWNER, "f")), 0
    validator = jsonschema.Draft202012Validator(OWNER)
    cat, dog = {"kind": "cat", "lives": 3}, {"kind": "puppy", "name": "x"}
    for pet in (cat, dog, {**cat, "friends": [dog, cat]}):
        for value in ({"pet": pet}, {"pet": pet, "first": {"lives": 1}}):
            validator.validate(value)
            assert accepts(matcher, value), value
    for wrong in ({"lives": 3}, {"kind": "dog", "lives": 3}, {"kind": "cow", "name": "x"}, {**cat, "more": 1}):
        assert not accepts(matcher, {"pet": wrong})
    for seed in range(20):
        text, has_ended = walk(matcher.deep_copy(), seed)
        if has_ended:
            validator.validate(json.loads(text))
            ended += 1
    assert ended >= 5


def test_a_schema_may_have_options_of_its_own_for_the_library() -> None:
    schema = {"type": "array", "items": {"type": "null"}, "x-guidance": {"whitespace_pattern": "", "lenient": True}}
    matcher = matcher_of("json_schema", json.dumps(schema))
    assert accepts(matcher, "[null,null]")
    assert not accepts(matcher, "[null, null]")
    with pytest.raises(grammar.GrammarError, match="not"):
        matcher_of("json_schema", json.dumps({**schema, "not": {"const": []}}))
