"""Keywords that restrict nothing: without them the same values match, and everything else stays as it is."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.constraint_fields import read_schema
from pipeline.api.plain_schema import plain_schema

OBJECT: dict[str, Any] = {"type": "object"}
OPEN = {**OBJECT, "properties": {"a": {}}}
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({**OBJECT, "propertyNames": TEXT}, OBJECT),
        ({**OBJECT, "propertyNames": {"type": ["string", "null"], "title": "x", "minLength": 0}}, OBJECT),
        ({**OBJECT, "propertyNames": {**TEXT, "format": "password"}}, OBJECT),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({**OBJECT, "dependencies": {}, "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}}, OBJECT),
        ({**OPEN, "required": ["a"], "dependentRequired": {"b": ["a"]}}, {**OPEN, "required": ["a"]}),
        ({**OBJECT, "properties": {"a": {"not": {}}}}, {**OBJECT, "properties": {"a": False}}),
        ({"type": "array", "items": {"not": True, "type": "string"}}, {"type": "array", "items": False}),
        ({**TEXT, "not": False}, TEXT),
        ({**OPEN, "unevaluatedProperties": False}, {**OPEN, "additionalProperties": False}),
        ({**OPEN, "unevaluatedProperties": True}, {**OPEN, "additionalProperties": True}),
        ({"allOf": [OPEN], "unevaluatedProperties": True}, {"allOf": [OPEN]}),
        (
            {**OPEN, "additionalProperties": TEXT, "unevaluatedProperties": False},
            {**OPEN, "additionalProperties": TEXT},
        ),
        ({"prefixItems": [TEXT], "unevaluatedItems": False}, {"prefixItems": [TEXT], "items": False}),
        ({**TEXT, "if": {"minLength": 1}}, TEXT),
        ({**TEXT, "if": {}, "unevaluatedItems": True}, TEXT),
        ({**TEXT, "then": False, "else": False}, TEXT),
        ({**TEXT, "format": "password"}, TEXT),
        (
            {"$defs": {"a": {**TEXT, "format": "byte"}}, "$ref": "#/$defs/a"},
            {"$defs": {"a": TEXT}, "$ref": "#/$defs/a"},
        ),
    ],
)
def test_keywords_without_effect_are_dropped(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert plain_schema(schema) == expected
    stored = json.loads(read_schema(schema, "f").text)
    assert json.loads(read_schema(stored, "f").text) == stored  # a request that is read again is the same


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"format": "password", "uniqueItems": False}},
        {"enum": [{"not": {}}], "default": {"not": {}}, "examples": [{"format": "byte"}]},
        {"properties": {"format": TEXT, "not": TEXT, "uniqueItems": TEXT, "propertyNames": TEXT}},
        {"x-own": {"format": "password"}},
        {**OBJECT, "propertyNames": {"pattern": "^a"}},
        {**OBJECT, "propertyNames": {"type": "integer"}},
        {"type": "array", "uniqueItems": True},
        {**OBJECT, "dependentRequired": {"a": ["b"]}},
        {**OBJECT, "required": [{}, 1], "dependentRequired": {"a": [{}, 1]}},  # malformed
        {"allOf": [OPEN], "unevaluatedProperties": False},
        {**OBJECT, "if": OPEN, "unevaluatedProperties": False},  # takes what the condition has evaluated
        {"type": "array", "contains": {}, "unevaluatedItems": False},
        {"type": "array", "unevaluatedItems": [{"format": "byte"}]},  # malformed
        {"not": TEXT},
        {"not": {}},  # nothing is left of it: it is refused as it was
        {"if": TEXT, "then": {"minLength": 1}},
        {**TEXT, "format": "date"},
    ],
)
def test_what_restricts_something_or_is_no_schema_stays(schema: dict[str, Any]) -> None:
    assert plain_schema(schema) == schema


class Counted(str):
    """A name that counts its comparisons with others."""

    n_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.n_compared += 1
        return str.__eq__(self, other)


def test_dependencies_are_read_in_time_that_grows_with_their_number() -> None:
    required = [Counted(f"p{index}") for index in range(1000)]
    schema = {**OBJECT, "required": required, "dependentRequired": {f"q{index}": ["p999"] for index in range(1000)}}
    Counted.n_compared = 0
    assert "dependentRequired" not in plain_schema(schema)
    assert Counted.n_compared <= 10_000


@pytest.mark.parametrize("key", ["additionalProperties", "unevaluatedProperties"])
@pytest.mark.parametrize("value", [True, {}])
def test_an_object_that_takes_others_is_not_closed(key: str, value: Any) -> None:
    stored = json.loads(read_schema({**OPEN, key: value}, "f").text)
    assert stored == {**OPEN, "additionalProperties": value}


NAMES = st.sampled_from(["a", "b"])
VALUES = st.recursive(
    st.integers(0, 2) | st.sampled_from(["", "a"]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=2) | st.lists(inner, max_size=2),
)
SCHEMAS = st.recursive(
    st.sampled_from([{}, True, False, TEXT, {"type": "integer"}, {"type": "string", "minLength": 1}]),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", ["object", "string"]]),
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "required": st.lists(NAMES, unique=True, max_size=1),
            "additionalProperties": inner,
            "unevaluatedProperties": inner,
            "propertyNames": inner,
            "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, unique=True, max_size=1), max_size=2),
            "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=1),
            "unevaluatedItems": inner,
            "contains": inner,
            "uniqueItems": st.booleans(),
            "maximum": st.sampled_from([1, 2**63 - 1, 1e15, 3.4e38]),
            "not": inner,
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "if": inner,
            "then": inner,
        },
    ),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_the_same_values_match_and_a_second_pass_changes_nothing(schema: Any, value: Any) -> None:
    whole = {"allOf": [schema]}
    made = plain_schema(whole)
    assert json.dumps(plain_schema(made)) == json.dumps(made)
    valid = jsonschema.Draft202012Validator(whole).is_valid(value)
    assert jsonschema.Draft202012Validator(made).is_valid(value) is valid
