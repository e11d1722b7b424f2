"""Discriminated unions of a JSON Schema as `anyOf` of branches that all require the tag.

Pydantic writes such a union as `oneOf` with a `discriminator`, and leaves a tag with a default out of `required`.
The library of grammars refuses a `oneOf` whose branches are references, or may overlap.  Where each branch requires a
tag of its own, no value matches two, and `anyOf` means the same.  What matches the result matches the schema as it was.

A branch that is a reference to a definition without a required tag becomes one to a copy that requires it, because the
definition may be used elsewhere.  Unions with tags that are not texts, or not distinct, stay as they are, and so do
those beyond the bounds: the gateway does this work in its event loop.  So do those inside a schema with an `$id`,
against which its references are resolved, not against the whole schema.

In a `oneOf` that stays, a branch that matches less could let another match more.  Its branches stay as they are, and if
one of them has a reference, which may lead to any definition, so does the whole schema.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any, NamedTuple

from pipeline.api.schema_keywords import ANNOTATIONS, with_subschemas

MAX_COPIED = 65_536  # characters of JSON of the definitions that are copied; unions beyond stay as they are
MAX_DEPTH = 64  # of unions and references within one another in a branch: the recursion stays far from Python's bound
# Branches, tags, required properties and names of copies that are read for all unions together: some 50 ms.  A schema
# of 64 KiB has a few thousand, but each of its unions may read them again, for another tag.
MAX_READ = 65_536
_DEFINITIONS = ("$defs", "definitions")
_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")  # of a definition; a copy would have the same


class _Union(NamedTuple):
    branches: list[dict[str, Any]]
    tags: frozenset[str]
    copies: tuple[str, ...]
    is_distinct: bool  # no tag belongs to two branches


class _Branch(NamedTuple):
    schema: dict[str, Any]  # requires the tag
    tags: frozenset[str]
    copies: tuple[str, ...] = ()  # names of the copies that it needs


def tagged_unions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its discriminated unions as `anyOf`."""
    unions = _Unions(schema)
    made = unions.changed_inside(schema)
    while unions.waiting:
        name = unions.waiting.pop(0)
        unions.used[name] = unions.changed(unions.copies[name])
    if unions.is_referring:
        return schema
    if unions.used:
        given = made.get("$defs")
        made["$defs"] = {**(given if isinstance(given, dict) else {}), **unions.used}
    return made


class _Unions:
    def __init__(self, root: dict[str, Any]) -> None:
        self.copies: dict[str, Any] = {}  # of definitions, as they are but for the tag
        self.used: dict[str, Any] = {}  # those that are added
        self.waiting: list[str] = []  # names of those whose own unions are still to be changed
        self._definitions = {
            f"#/{key}/{name}": one
            for key in _DEFINITIONS
            if isinstance(root.get(key), dict)
            for name, one in root[key].items()
        }
        names = (f"tagged-{index}" for index in count())
        self._names = (name for name in names if f"#/$defs/{name}" not in self._definitions)  # of the next copies
        self._branches: dict[tuple[str, str], _Branch | None] = {}  # by reference and tag; None: none, or not yet
        self._n_left, self._n_unread, self._depth = MAX_COPIED, MAX_READ, 0
        self.is_referring = False  # a oneOf that stays has a reference

    def changed(self, schema: Any) -> Any:
        return self.changed_inside(schema) if isinstance(schema, dict) and not _has_own_base(schema) else schema

    def changed_inside(self, schema: dict[str, Any]) -> dict[str, Any]:
        union = self._union(schema)
        if union is None and "oneOf" in schema and '"$ref"' in json.dumps(schema["oneOf"]):
            self.is_referring = True
        return with_subschemas(schema if union is None else union, self.changed, without=("oneOf",))

    def _union(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        given, members = schema.get("discriminator"), schema.get("oneOf")
        tag = given.get("propertyName") if isinstance(given, dict) else None
        if not isinstance(tag, str) or not isinstance(members, list) or "anyOf" in schema:
            return None
        found = self._all(members, tag)
        if found is None or not found.is_distinct:
            return None
        for name in found.copies:
            if name not in self.used:
                self.used[name] = None
                self.waiting.append(name)
        # Without the discriminator: beside a key that the library does not know, it refuses references that recur.
        made = {("anyOf" if key == "oneOf" else key): one for key, one in schema.items() if key != "discriminator"}
        return {**made, "anyOf": found.branches}

    def _all(self, members: list[Any], tag: str) -> _Union | None:
        branches = []
        for member in members:
            branch = self._branch(member, tag)
            if branch is None:
                return None
            branches.append(branch)
        n_tags = sum(len(one.tags) for one in branches)
        self._n_unread -= n_tags + sum(len(one.copies) for one in branches)
        tags: frozenset[str] = frozenset().union(*(one.tags for one in branches))
        copies = tuple(dict.fromkeys(name for one in branches for name in one.copies))
        return _Union([one.schema for one in branches], tags, copies, n_tags == len(tags))

    def _branch(self, schema: Any, tag: str) -> _Branch | None:
        """The schema, requiring the tag; None if its tags cannot be listed, or beyond the bounds."""
        self._n_unread -= 1
        if not isinstance(schema, dict) or self._depth > MAX_DEPTH or self._n_unread < 0:
            return None
        self._depth += 1
        found = self._requiring(schema, tag)
        self._depth -= 1
        return found

    def _requiring(self, schema: dict[str, Any], tag: str) -> _Branch | None:
        has_own_base = _has_own_base(schema)
        keys = set() if has_own_base else schema.keys() - ANNOTATIONS
        if keys == {"$ref"}:
            found = self._definition(schema["$ref"], tag)
            return None if found is None else _Branch({**schema, **found.schema}, found.tags, found.copies)
        for key in ("oneOf", "anyOf"):  # a union in the union, with another tag
            if keys == {key} and isinstance(schema[key], list):
                inner = self._all(schema[key], tag)
                if not inner or not inner.branches:
                    return None
                return _Branch({**schema, key: inner.branches}, inner.tags, inner.copies)
        properties, required = schema.get("properties"), schema.get("required", [])
        tags = self._values(properties.get(tag), has_own_base) if isinstance(properties, dict) else None
        kinds = schema.get("type", ["object"])
        if (
            not tags
            or not isinstance(required, list)
            or "object" not in (kinds if isinstance(kinds, list) else [kinds])
        ):
            return None
        self._n_unread -= len(required)
        made = schema if kinds == "object" else {**schema, "type": "object"}
        return _Branch(made if tag in required else {**made, "required": [*required, tag]}, tags)

    def _definition(self, reference: Any, tag: str) -> _Branch | None:
        """A reference to the definition, or to a copy, that requires the tag."""
        target = self._target(reference)
        if not isinstance(target, dict):
            return None
        if (reference, tag) in self._branches:
            return self._branches[reference, tag]
        self._branches[reference, tag] = None  # of a definition that leads back to itself
        branch = self._branch(target, tag)
        if branch is None:
            return None
        is_same = branch.schema == target
        found = _Branch({"$ref": reference}, branch.tags, branch.copies) if is_same else self._copy(branch)
        self._branches[reference, tag] = found
        return found

    def _copy(self, branch: _Branch) -> _Branch | None:
        self._n_left -= len(json.dumps(branch.schema)) if self._n_left > 0 else 0
        if self._n_left <= 0 or not branch.schema.keys().isdisjoint(_NAMES):
            return None
        name = next(self._names)
        self.copies[name] = branch.schema
        self._definitions[f"#/$defs/{name}"] = branch.schema
        return _Branch({"$ref": f"#/$defs/{name}"}, branch.tags, (name, *branch.copies))

    def _target(self, reference: Any) -> Any:
        return self._definitions.get(reference) if isinstance(reference, str) else None

    def _values(self, schema: Any, has_own_base: bool) -> frozenset[str] | None:
        """The texts that the schema of a tag allows, None if they are not listed."""
        if isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}:
            schema = None if has_own_base or _has_own_base(schema) else self._target(schema["$ref"])
        if not isinstance(schema, dict):
            return None
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        self._n_unread -= len(values) if isinstance(values, list) else 0
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            return None
        return frozenset(values)


def _has_own_base(schema: dict[str, Any]) -> bool:
    """Whether references in the schema, which is inside another, are resolved against its own `$id`."""
    return isinstance(schema.get("$id"), str)
