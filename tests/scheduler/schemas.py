"""JSON Schemas by the features that real ones use: types, bounds, patterns, formats, combinations and references."""

from __future__ import annotations

from typing import Any


def obj(required: bool = True, **properties: Any) -> dict[str, Any]:
    """A closed object."""
    made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**made, "required": list(properties)} if required else made


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": obj(
            value={"type": "integer", "minimum": 0, "maximum": 9},
            children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        )
    },
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "string": obj(a={"type": "string", "maxLength": 8}),
    "string lengths": obj(a={"type": "string", "minLength": 3, "maxLength": 6}),
    "integer": obj(a={"type": "integer", "minimum": -5, "maximum": 300}),
    "exclusive bounds": obj(a={"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9}),
    "number bounds": obj(a={"type": "number", "minimum": 0.5, "maximum": 2.25}),
    "large bounds": obj(a={"type": "integer", "minimum": 10**9, "maximum": 10**12}),
    "multiple": obj(a={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}),
    "boolean": obj(a={"type": "boolean"}),
    "null": obj(a={"type": "null"}),
    "type list": obj(a={"type": ["boolean", "null"]}),
    "type list of scalars": obj(a={"type": ["integer", "null"], "minimum": 0, "maximum": 99}),
    "enum": obj(a={"enum": ["red", "green", "blue"]}),
    "mixed enum": obj(a={"enum": ["one", 2, None, True, [1], {"k": "v"}]}),
    "enum with escapes": obj(a={"enum": ['a"b', "back\\slash", "new\nline", "é", "日本"]}),
    "const": obj(a={"const": "fixed"}, b={"const": 7}),
    "const object": obj(a={"const": {"x": [1, 2], "y": None}}),
    "required of several": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "all optional": obj(False, a={"type": "boolean"}, b={"type": "null"}),
    "empty object": obj(),
    "nested": obj(a=obj(b=obj(c=obj(d={"type": "boolean"})))),
    "array": obj(a={"type": "array", "items": {"type": "boolean"}, "maxItems": 5}),
    "array bounds": obj(a={"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4}),
    "fixed array": obj(a={"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 3}),
    "empty array": obj(a={"type": "array", "items": {"type": "null"}, "maxItems": 0}),
    "prefix items": obj(
        a={
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"const": "x"}],
            "items": False,
            "minItems": 2,
        }
    ),
    "array of objects": obj(a={"type": "array", "items": obj(k={"enum": ["x", "y"]}), "minItems": 1, "maxItems": 3}),
    "array of arrays": obj(
        a={"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2}
    ),
    "top-level array": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    "top-level enum": {"enum": ["yes", "no"]},
    "pattern": obj(a={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}),
    "pattern with alternatives": obj(a={"type": "string", "pattern": "^(foo|ba[rz])+$", "maxLength": 12}),
    "unanchored pattern": obj(a={"type": "string", "pattern": "[0-9]{2}", "maxLength": 6}),
    "date": obj(a={"type": "string", "format": "date"}),
    "time": obj(a={"type": "string", "format": "time"}),
    "date-time": obj(a={"type": "string", "format": "date-time"}),
    "uuid": obj(a={"type": "string", "format": "uuid"}),
    "ipv4": obj(a={"type": "string", "format": "ipv4"}),
    "email": obj(a={"type": "string", "format": "email", "maxLength": 40}),
    "hostname": obj(a={"type": "string", "format": "hostname", "maxLength": 30}),
    "anyOf": obj(a={"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 4}]}),
    "anyOf objects": {"anyOf": [obj(kind={"const": "a"}, x={"type": "boolean"}), obj(kind={"const": "b"})]},
    "oneOf types": obj(a={"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 50}]}),
    "oneOf discriminated": {
        "oneOf": [obj(kind={"const": "circle"}, r={"enum": [1, 2]}), obj(kind={"const": "square"}, s={"enum": [3, 4]})]
    },
    "allOf": obj(a={"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 20}]}),
    "allOf objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    },
    "$defs": {
        **obj(a={"$ref": "#/$defs/color"}, b={"$ref": "#/$defs/color"}),
        "$defs": {"color": {"enum": ["r", "g"]}},
    },
    "definitions": {**obj(a={"$ref": "#/definitions/f"}), "definitions": {"f": {"type": "boolean"}}},
    "recursive tree": TREE,
    "recursive list": {
        "$ref": "#/$defs/list",
        "$defs": {"list": {"anyOf": [{"type": "null"}, obj(head={"enum": [0, 1]}, tail={"$ref": "#/$defs/list"})]}},
    },
    "additional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "number properties": {**obj(False, a={"type": "null"}, b={"type": "null"}), "minProperties": 1},
    "title and description": {
        **obj(a={"type": "boolean", "title": "T", "description": "D", "default": True}),
        "title": "X",
    },
    "person": obj(
        name={"type": "string", "minLength": 1, "maxLength": 12},
        age={"type": "integer", "minimum": 0, "maximum": 150},
        emails={"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        address=obj(street={"type": "string", "maxLength": 10}, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
        status={"enum": ["active", "away", None]},
    ),
}
