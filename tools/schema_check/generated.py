"""JSON Schemas of all features that real ones use, made from a number: the same number gives the same schema.

The features, and about how frequent they are, are those that the JSONSchemaBench paper (arXiv 2501.10868) counts.  With
`refusable`, some schemas have a keyword that constrained output does not support.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

MAX_DEPTH = 3
WORDS = ("id", "name", "age", "tags", "kind", "value", "unit", "size", "éta", "a b", "x-y", 'q"t', "items", "type")
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}[0-9]{3}$", "^(foo|bar)+$", "ab?c", r"^\d{1,3}(\.\d{1,2})?$", r"^[^\s]{3,9}$")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "uri")
ENUMS = (["red", "green"], [1, 2.5, -3], [None, True, "x"], ['a"b', "back\\slash", "é"], [{"k": [1]}, []])
NOT_SUPPORTED: dict[str, Any] = {
    "not": {"type": "null"},
    "uniqueItems": True,
    "contains": {"const": 1},
    "dependencies": {"a": ["b"]},
    "if": {"const": 1},
    "unevaluatedProperties": False,
}


def generated(number: int, *, refusable: bool = True) -> Schema:
    """Return the schema of that number."""
    made = _Maker(random.Random(number)).whole()
    rng = random.Random(-number - 1)
    if refusable and rng.random() < 0.15:
        keyword = rng.choice(list(NOT_SUPPORTED))
        made[keyword] = NOT_SUPPORTED[keyword]
    return made


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Schema] = {}
        self._makers: dict[str, tuple[int, Callable[[int], Schema]]] = {
            "string": (6, self._string),
            "number": (3, self._number),
            "integer": (4, self._integer),
            "boolean": (2, lambda depth: {"type": "boolean"}),
            "null": (1, lambda depth: {"type": "null"}),
            "enum": (2, lambda depth: {"enum": list(self._rng.choice(ENUMS))}),
            "const": (1, lambda depth: {"const": self._rng.choice(self._rng.choice(ENUMS))}),
            "types": (1, lambda depth: {"type": self._rng.sample(["string", "integer", "boolean", "null"], 2)}),
            "object": (5, self._object),
            "array": (4, self._array),
            "anyOf": (2, self._any_of),
            "oneOf": (1, self._one_of),
            "allOf": (1, self._all_of),
            "$ref": (2, self._ref),
            "recursion": (1, self._recursion),
        }

    def whole(self) -> Schema:
        """An object, as nearly all real schemas describe, with its definitions."""
        made = self._object(0)
        if self._definitions:
            made["$defs"] = self._definitions
        if self._rng.random() < 0.2:
            made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return made

    def _any(self, depth: int) -> Schema:
        names = [name for name in self._makers if depth < MAX_DEPTH or name not in ("object", "array", "recursion")]
        if depth >= MAX_DEPTH:
            names = [name for name in names if name[0].islower() and not name.endswith("Of")]
        (name,) = self._rng.choices(names, [self._makers[name][0] for name in names])
        made = self._makers[name][1](depth + 1)
        if self._rng.random() < 0.2:
            made = {"description": "What it is.", "title": "It", **made}
        return made

    def _string(self, depth: int) -> Schema:
        kind = self._rng.random()
        if kind < 0.25:
            return {"type": "string", "pattern": self._rng.choice(PATTERNS)}
        if kind < 0.45:
            return {"type": "string", "format": self._rng.choice(FORMATS)}
        low = self._rng.choice((0, 0, 1, 4))
        return {"type": "string", "minLength": low, "maxLength": low + self._rng.choice((0, 3, 12))}

    def _integer(self, depth: int) -> Schema:
        low = self._rng.choice((-1000, -7, 0, 1, 10**6))
        made: Schema = {"type": "integer"}
        if self._rng.random() < 0.6:
            made[self._rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self._rng.random() < 0.6:
            made[self._rng.choice(("maximum", "exclusiveMaximum"))] = low + self._rng.choice((2, 90, 12345))
        elif self._rng.random() < 0.3:
            made["multipleOf"] = self._rng.choice((2, 5, 12))
        return made

    def _number(self, depth: int) -> Schema:
        made: Schema = {"type": "number"}
        if self._rng.random() < 0.7:
            low = self._rng.choice((-1.5, 0, 0.25, 3, -100))
            made |= {"minimum": low, "maximum": low + self._rng.choice((0.5, 10, 1000))}
        return made

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(WORDS, self._rng.randrange(1, 5))
        made: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if self._rng.random() < 0.7:
            made["required"] = self._rng.sample(names, self._rng.randrange(1, len(names) + 1))
        kind = self._rng.random()
        if kind < 0.4:
            made["additionalProperties"] = False
        elif kind < 0.55:
            made["additionalProperties"] = self._any(MAX_DEPTH)
        elif kind < 0.65:
            made |= {"patternProperties": {"^p_[a-z]{1,4}$": {"type": "integer"}}, "additionalProperties": False}
        return made

    def _array(self, depth: int) -> Schema:
        made: Schema = {"type": "array", "items": self._any(depth)}
        if self._rng.random() < 0.8:
            low = self._rng.choice((0, 0, 1, 2))
            made |= {"minItems": low, "maxItems": low + self._rng.choice((0, 1, 3))}
        if self._rng.random() < 0.15:
            made |= {"prefixItems": [{"type": "boolean"}, {"const": "x"}], "maxItems": 4}
            made["minItems"] = min(made.get("minItems", 0), 2)
        return made

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randrange(2, 4))]}

    def _one_of(self, depth: int) -> Schema:
        """Branches that no value satisfies at once."""
        text, empty = {"type": "string", "maxLength": 4}, {"type": "array", "maxItems": 0}
        kinds: list[Schema] = [text, {"type": "boolean"}, empty]
        return {"oneOf": self._rng.sample(kinds, 2)}

    def _all_of(self, depth: int) -> Schema:
        return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]}

    def _ref(self, depth: int) -> Schema:
        name = f"d{self._rng.randrange(3)}"
        if name not in self._definitions:
            self._definitions[name] = {"type": "boolean"}  # while it is made
            self._definitions[name] = self._any(max(depth, MAX_DEPTH - 1))
        return {"$ref": f"#/$defs/{name}"}

    def _recursion(self, depth: int) -> Schema:
        children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
        self._definitions["tree"] = {
            "type": "object",
            "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "children": children},
            "required": ["v"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/tree"}
