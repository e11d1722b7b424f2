"""Discriminated unions: what matches the result matches the schema as given, and nothing else changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.constraint_fields import read_schema
from pipeline.api.tagged_unions import MAX_COPIED, MAX_DEPTH, _Unions, tagged_unions


def branch(*tags: str, tag: str = "kind", **more: Any) -> dict[str, Any]:
    """As Pydantic writes a class whose tag has a default."""
    kind = {"const": tags[0]} if len(tags) == 1 else {"enum": list(tags)}
    return {"type": "object", "properties": {tag: {**kind, "default": tags[0]}, **more.pop("properties", {})}, **more}


def union(*members: Any, tag: str = "kind", **more: Any) -> dict[str, Any]:
    return {"oneOf": list(members), "discriminator": {"propertyName": tag}, **more}


A, B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
DEFS = {"A": branch("a"), "B": branch("b", "bb")}


def test_references_lead_to_copies_that_require_the_tag() -> None:
    schema = {"$defs": DEFS, "properties": {"one": union(A, B, title="U"), "many": {"items": union(B, A)}, "a": A}}
    made = tagged_unions(schema)
    copies = [{"$ref": f"#/$defs/tagged-{index}"} for index in range(2)]
    assert made["properties"]["one"]["anyOf"] == copies
    assert made["properties"]["many"]["items"]["anyOf"] == copies[::-1]
    assert made["properties"]["a"] == A
    assert made["$defs"]["tagged-0"] == {**DEFS["A"], "required": ["kind"]}
    assert {name: made["$defs"][name] for name in DEFS} == DEFS
    assert tagged_unions(made) == made
    assert "oneOf" not in json.dumps(made)


def test_definitions_that_require_their_tag_are_used_as_they_are() -> None:
    schema = {"$defs": {name: {**one, "required": ["kind"]} for name, one in DEFS.items()}, **union(A, B)}
    assert tagged_unions(schema)["anyOf"] == [A, B]
    assert tagged_unions(schema)["$defs"] == schema["$defs"]


def test_the_base_of_the_whole_schema_is_that_of_its_references() -> None:
    assert "oneOf" not in tagged_unions({"$id": "https://a.example/", "$defs": DEFS, **union(A, B)})
    own = {"A": {**DEFS["A"], "required": ["kind"], "$id": "https://a.example/"}, "B": DEFS["B"]}
    assert tagged_unions({"$defs": own, **union(A, B)})["anyOf"][0] == A


def test_the_branches_of_a_union_are_closed_as_other_objects() -> None:
    made = json.loads(read_schema({"$defs": DEFS, "properties": {"u": union(A, B)}}, "f").text)
    assert made["$defs"]["tagged-0"]["additionalProperties"] is False
    assert json.loads(read_schema(made, "f").text) == made


def test_a_recursive_union_and_a_union_in_a_union_end() -> None:
    node = branch("a", properties={"children": {"type": "array", "items": union(A, B)}})
    made = tagged_unions({"$defs": {"A": node, "B": DEFS["B"]}, **union(A, B)})
    copy = made["$defs"]["tagged-0"]
    assert copy["properties"]["children"]["items"]["anyOf"] == made["anyOf"]
    colours = [branch("red", "blue", tag="colour", properties={"kind": {"const": "cat"}}), branch("b", tag="colour")]
    colours[1]["properties"]["kind"] = {"const": "cat"}
    nested = tagged_unions(union(union(*colours, tag="colour"), branch("dog")))
    assert [one["required"] for one in nested["anyOf"][0]["anyOf"]] == [["kind", "colour"]] * 2
    assert nested["anyOf"][1]["required"] == ["kind"]


def test_the_work_is_bounded_where_unions_share_their_branches() -> None:
    """Ten references at each of twenty levels: 10 ** 20 paths."""
    levels = {f"L{index}": {"anyOf": [{"$ref": f"#/$defs/L{index + 1}"}] * 10} for index in range(20)}
    made = tagged_unions({"$defs": {**levels, "L20": DEFS["A"]}, **union({"$ref": "#/$defs/L0"}, branch("b"))})
    assert made["anyOf"][0] == {"$ref": "#/$defs/tagged-20"}
    assert len(made["$defs"]) == 2 * 21


def nested(depth: int, *members: Any) -> dict[str, Any]:
    inner = union(*members)
    for _ in range(depth - 1):
        inner = union(inner)
    return inner


def test_unions_beyond_the_bounds_stay_as_they_are() -> None:
    """Each level of unions reads all branches below it again, and those of a definition are read for each tag."""
    assert "oneOf" not in json.dumps(tagged_unions(nested(MAX_DEPTH, branch("a"), branch("b"))))
    deep = nested(MAX_DEPTH + 2, branch("a"))
    assert tagged_unions(deep) == deep
    many = [branch(str(index)) for index in range(2000)]
    assert "oneOf" not in json.dumps(tagged_unions(nested(3, *many)))
    assert "oneOf" in json.dumps(tagged_unions(nested(30, *many)))
    tags = [f"t{index}" for index in range(300)]
    leaf = {"properties": {tag: {"const": "a"} for tag in tags}, "required": tags}
    definitions = {"L": leaf, "many": {"anyOf": [{"$ref": "#/$defs/L"}] * 900}}
    unions = {tag: union({"$ref": "#/$defs/many"}, tag=tag) for tag in tags}
    schema = {"$defs": definitions, "properties": unions}
    made = _Unions(schema).changed_inside(schema)["properties"]
    assert "anyOf" in made["t0"] and made["t299"] == unions["t299"]
    assert tagged_unions(schema) == schema  # since some stay, which have references


@pytest.mark.parametrize(
    "costly",
    [
        {"properties": {"kind": {"$ref": "#/$defs/tags"}}, "required": "kind"},  # malformed, after its tags
        {"anyOf": [{"$ref": "#/$defs/many"}] * 100},  # each with the names of 300 copies
    ],
)
def test_what_is_read_in_vain_counts(costly: dict[str, Any]) -> None:
    members = {f"L{index}": branch("a") for index in range(300)}
    many = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in members]}
    definitions = {**members, "many": many, "tags": {"enum": [str(index) for index in range(1000)]}}
    unions = {f"p{index}": union(costly) for index in range(70)}
    schema = {"$defs": definitions, "properties": {**unions, "last": union(branch("a"))}}
    assert "oneOf" in _Unions(schema).changed_inside(schema)["properties"]["last"]


def test_a_union_that_stays_keeps_the_definitions_of_its_references() -> None:
    """`{}` matches both branches, and so not the schema. If `B` required its tag, it would."""
    schema = {"$defs": {"B": union(branch("a"))}, **union(branch("a"), B)}
    assert tagged_unions(schema) == schema


def test_names_that_are_taken_are_passed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def counted() -> Iterator[int]:
        for index in itertools.count():
            tried.append(index)
            yield index

    monkeypatch.setattr("pipeline.api.tagged_unions.count", counted)
    taken = {f"tagged-{index}": {"type": "null"} for index in (0, 1, 3)}
    made = tagged_unions({"$defs": {**taken, **DEFS}, **union(A, B)})
    assert [one["$ref"] for one in made["anyOf"]] == ["#/$defs/tagged-2", "#/$defs/tagged-4"]
    assert tried == [0, 1, 2, 3, 4]


CHAIN = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(3000)}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [branch("a"), branch("b")]},
        union(branch("a"), branch("b", "a")),
        union(branch("a"), {"type": "string"}),
        union(branch("a"), {**branch("b"), "type": ["string", "null"]}),
        union(branch("a"), True),
        union(branch("a"), {"$ref": "#/$defs/missing"}),
        union(branch("a"), {"$ref": ["#"]}),
        union(branch("a"), {**branch("b"), "required": "kind"}),
        {**union(branch("a")), "discriminator": {}},
        {**union(branch("a")), "discriminator": "kind"},
        {"properties": {"a": {"properties": {"kind": {"const": 1}}, **union(branch("b"), {"const": {"kind": "b"}})}}},
        {"$defs": {"A": {**DEFS["A"], "$anchor": "a"}}, **union(A)},
        {"$defs": {"A": A}, **union(A)},
        {"$defs": {"A": {**DEFS["A"], "description": "x" * MAX_COPIED}}, **union(A)},
        {"$defs": DEFS, "properties": {"a": {"$id": "https://a.example/", "$defs": DEFS, **union(A, B)}}},
        {"$defs": DEFS, "items": {"$id": "https://a.example/", "items": union(A, B)}},
        {"$defs": DEFS, **union({"$id": "https://a.example/", **union(A)}, B)},
        {"$defs": {"A": {"const": "a"}}, **union({"properties": {"kind": {"$id": "https://a.example/", **A}}})},
        {"$defs": {"A": {"const": "a"}}, **union({"properties": {"kind": A}, "$id": "https://a.example/"})},
        {"$defs": CHAIN, **union({"$ref": "#/$defs/d0"})},
        {"default": union(branch("a"), branch("b")), "enum": [union(branch("a"))]},
        {"oneOf": [{"properties": {"u": union(branch("a"), branch("b"))}}, {"type": "null"}]},
    ],
)
def test_other_unions_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert tagged_unions(schema) == schema


TAGS = st.sampled_from(["a", "b"])
OBJECTS = st.builds(
    lambda tags, required, x, kind: {**branch(*tags, properties={"x": x}), "required": required, **kind},
    st.lists(TAGS, min_size=1, max_size=2, unique=True),
    st.sampled_from([[], ["x"], ["kind"]]),
    st.sampled_from([True, {"type": "integer"}]),
    st.sampled_from([{}, {"type": ["object", "null"]}, {"additionalProperties": False}]),
)
MEMBERS = st.recursive(
    OBJECTS | st.sampled_from([A, B, {"type": "null"}]),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda members: union(*members)),
    max_leaves=4,
)
VALUES = st.none() | st.dictionaries(st.sampled_from(["kind", "x"]), st.sampled_from(["a", "b", 1]))


def named_in(schema: Any) -> set[str]:
    """The definitions that a schema refers to; all of its references apply to the same value."""
    return {name for name in DEFS if f'"#/$defs/{name}"' in json.dumps(schema)}


@given(st.lists(MEMBERS, min_size=1, max_size=3), MEMBERS, MEMBERS, VALUES)
def test_what_matches_the_result_matches_the_schema(members: list[Any], one: Any, other: Any, value: Any) -> None:
    schema = {"$defs": {"A": one, "B": other}, **union(*members)}
    made = tagged_unions(schema)
    assert tagged_unions(made) == made
    if "A" in named_in(one) or "B" in named_in(other) or (named_in(one) and named_in(other)):
        return  # a reference that leads back to itself has no meaning
    if jsonschema.Draft202012Validator(made).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
