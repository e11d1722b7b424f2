"""Closing the objects of a schema: what matches the closed schema matches the given one, and something does."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.closed_schema import closed, closed_arguments

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}
CLOSED_A = {**A, "additionalProperties": False}
NULL = {"type": "null"}
REF = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"properties": {"x": A}}, {"properties": {"x": CLOSED_A}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"type": "array", "prefixItems": [A, INTEGER]}, {"type": "array", "prefixItems": [CLOSED_A, INTEGER]}),
        ({"anyOf": [A, NULL], "default": None}, {"anyOf": [CLOSED_A, NULL], "default": None}),
        ({"allOf": [A], "title": "x"}, {"allOf": [CLOSED_A], "title": "x"}),
        ({"$defs": {"A": A}, "anyOf": [REF, NULL]}, {"$defs": {"A": CLOSED_A}, "anyOf": [REF, NULL]}),
        (
            {"type": "object", "additionalProperties": A},
            {"type": "object", "additionalProperties": CLOSED_A},
        ),
        (
            {"$defs": {"A": A}, "properties": {"x": {**REF, "description": "d"}}, "required": ["x"]},
            {
                "$defs": {"A": CLOSED_A},
                "properties": {"x": {**REF, "description": "d"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_objects_with_properties_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": INTEGER},
        {**A, "patternProperties": {"^x": INTEGER}},
        {**A, "required": ["b"]},
        {**A, "required": [{}]},  # malformed: the library of grammars refuses it
        {**A, "minProperties": 2},
        {**A, "enum": [{"a": 1, "b": 2}]},
        {**A, "dependentRequired": {"a": ["b"]}},
        {**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"allOf": [A, {"properties": {"b": INTEGER}, "required": ["b"]}]},
        {"oneOf": [A, {"properties": {"b": INTEGER}}]},  # closed, their texts would match both branches as given
        {"not": A},
        {"type": "array", "contains": A},
        {"$defs": {"A": A}, "allOf": [REF, {"required": ["b"]}]},
        {"$defs": {"A": A}, "properties": {"x": REF}, "anyOf": [{"properties": {"x": {"required": ["b"]}}}]},
        {"$defs": {"A": {**A, "$dynamicAnchor": "A"}}, "$dynamicRef": "#A"},
    ],
)
def test_what_is_a_part_of_something_stays_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.one_of(st.integers(0, 3), st.none()), lambda inner: st.dictionaries(NAMES, inner) | st.lists(inner, max_size=2)
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, unique=True, max_size=2),
            "minProperties": st.integers(0, 3),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "additionalProperties": st.booleans() | inner,
        },
    )


def _schemas(*leaves: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.sampled_from([INTEGER, NULL, {}, *leaves]),
        lambda inner: (
            _objects(inner)
            | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
            | st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)})
            | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
            | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
        ),
        max_leaves=8,
    )


@given(_schemas(REF), _schemas(), VALUES)
def test_what_matches_the_closed_schema_matches_the_given_one(schema: Any, target: Any, value: Any) -> None:
    whole = {**schema, "$defs": {"A": target}}
    if jsonschema.Draft202012Validator(closed(whole)).is_valid(value):
        assert jsonschema.Draft202012Validator(whole).is_valid(value)


def test_a_schema_may_be_as_deep_as_a_body() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):  # as deep as a body may be
        schema = {"properties": {"a": schema}}
    assert closed(schema)["additionalProperties"] is False


@pytest.mark.parametrize("keyword", ["items", "additionalProperties"])
def test_the_work_grows_with_the_size_of_a_schema_alone(keyword: str) -> None:
    """A keyword that holds one schema or a list is followed once: twice at each level would never end."""
    schema: dict[str, Any] = A
    for _ in range(100):
        schema = {keyword: schema}
    made: Any = closed(schema)
    for _ in range(100):
        made = made[keyword]
    assert made == CLOSED_A


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    none: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    assert closed_arguments(none) == {**none, "additionalProperties": False}
    assert closed_arguments(A) == CLOSED_A
    inner = {"type": "object", "properties": {"any": none}}
    assert closed_arguments(inner)["properties"]["any"] == none


@pytest.mark.parametrize(
    "more",
    [{"additionalProperties": True}, {"minProperties": 1}, {"patternProperties": {"^x": {}}}, {"required": ["a"]}],
)
def test_a_tool_whose_schema_says_more_is_not_closed(more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {}, **more}
    assert closed_arguments(schema) == schema
    assert closed_arguments({"type": "object"}) == {"type": "object"}
