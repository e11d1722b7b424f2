"""Sixteen JSON Schemas of kinds that requests have, for the benchmark of constrained output.

Each describes a list of at least `LEAST` records, so that no output ends before its last token.
"""

from __future__ import annotations

from typing import Any

LEAST = 500  # records of a list: more than an output has tokens

Schema = dict[str, Any]


def record(**properties: Any) -> Schema:
    """A closed object whose properties are all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def several(items: Schema, least: int, most: int) -> Schema:
    """A list of `least` to `most` items."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TEXT: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "minLength": 1, "maxLength": 24}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 5000}
AMOUNT: Schema = {"type": "number", "minimum": 0, "maximum": 10000}
FLAG: Schema = {"type": "boolean"}
DAY: Schema = {"type": "string", "format": "date"}
COLOURS = ["red", "green", "blue", "black", "white", "dark grey", "light grey", "orange"]

TREE = record(label=SHORT, children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 3})
SHAPES = [record(kind={"const": "circle"}, radius=AMOUNT), record(kind={"const": "box"}, width=AMOUNT, height=AMOUNT)]

RECORDS: dict[str, Schema] = {
    "text": TEXT,
    "person": record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, city=TEXT),
    "order": record(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, count=COUNT, price=AMOUNT, gift=FLAG),
    "event": record(title=TEXT, on=DAY, at={"type": "string", "format": "time"}, tags=several(SHORT, 0, 4)),
    "colour": {"enum": COLOURS},
    "point": record(x={"type": "number"}, y={"type": "number"}, z={"type": ["number", "null"]}),
    "tree": {"$ref": "#/$defs/tree"},
    "shape": {"anyOf": SHAPES},
    "contact": record(
        mail={"type": "string", "format": "email"},
        phone={"type": "string", "pattern": r"^\+[0-9]{2} [0-9]{3} [0-9]{4,7}$"},
        address=record(street=TEXT, number=COUNT, postcode={"type": "string", "pattern": "^[0-9]{5}$"}),
    ),
    "open": {"type": "object", "properties": {"id": COUNT}, "required": ["id"], "additionalProperties": TEXT},
    "call": record(name={"enum": ["search", "open", "close"]}, arguments=record(query=TEXT, limit=COUNT)),
    "matrix": several({"type": "number", "minimum": -1, "maximum": 1}, 4, 4),
    "answer": record(reasoning=TEXT, steps=several(TEXT, 1, 5), result={"type": ["string", "number", "boolean"]}),
    "review": record(stars={"type": "integer", "minimum": 1, "maximum": 5}, text={"type": "string", "maxLength": 400}),
    "log": record(level={"enum": ["debug", "info", "warning", "error"]}, message=TEXT, uuid={"format": "uuid"}),
    "any": {},
}


def schemas() -> dict[str, Schema]:
    """The schemas by name."""
    lists: dict[str, Schema] = {
        name: {"type": "array", "items": one, "minItems": LEAST} for name, one in RECORDS.items()
    }
    lists["tree"]["$defs"] = {"tree": TREE}
    lists["log"]["items"]["properties"]["uuid"]["type"] = "string"
    return lists
