"""The fields that constrain what a model may write: OpenAI's, llama-server's and vLLM's names for the same thing.

Each reader returns a `Constraint`, or None where the field asks for plain text.  Whether the constraint can be compiled
is found out later, by the scheduler.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pipeline.api.closed_schema import closed
from pipeline.api.fields import Reader, flag, invalid_value, object_schema, read_fields, show, text
from pipeline.api.json_body import check_size
from pipeline.api.json_schema import any_of, array_of, described, schema_of
from pipeline.api.plain_schema import plain_schema
from pipeline.api.tagged_unions import tagged_unions
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Constraint

MAX_TEXT = 65_536  # bytes of a constraint; scheduler.constraints.max_bytes may be less
MAX_CHOICES = 1024
_GBNF_RULE = re.compile(r"(?m)^\s*[A-Za-z][A-Za-z0-9_-]*\s*::=")
_ANY_OBJECT = '{"type":"object"}'


def _constraint(kind: str, content: str, name: str) -> Constraint:
    _check_bytes(content, name)
    return Constraint(kind, content, name)


def _check_bytes(content: str, name: str) -> None:
    try:
        size = len(content.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} has a lone surrogate; send whole characters", name) from None
    if size > MAX_TEXT:
        raise InvalidRequest(f"{name} has {size} bytes; at most {MAX_TEXT} are allowed: shorten it", name)


_TEXT = text(MAX_TEXT, empty=False)


@described(any_of({"type": "object"}, {"type": "string", "contentMediaType": "application/schema+json"}))
def read_schema(value: Any, name: str) -> Constraint:
    """Read a JSON Schema: an object, or its JSON text."""
    if isinstance(value, str):
        check_size(value.encode(errors="surrogatepass"), name, name)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} is not valid JSON: {error}", name) from None
    if not isinstance(value, dict):
        raise invalid_value(name, value, "a JSON Schema, which is an object")
    try:
        _check_bytes(_compact(value), name)  # before the schema is rewritten, which would take time
        content = _compact(closed(tagged_unions(plain_schema(value))))
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deeply; flatten it", name) from None
    return _constraint("json_schema", content, name)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@described(schema_of(_TEXT))
def read_regex(value: Any, name: str) -> Constraint:
    """Read a regular expression that the whole output must match."""
    return _constraint("regex", _TEXT(value, name), name)


@described(array_of(schema_of(_TEXT), least=1, most=MAX_CHOICES))
def read_choice(value: Any, name: str) -> Constraint:
    """Read the texts of which the output must be one."""
    if not isinstance(value, list) or not value:
        raise invalid_value(name, value, "an array of texts")
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{name} has {len(value)} texts; at most {MAX_CHOICES} are allowed", name)
    choices = list(dict.fromkeys(_TEXT(item, f"{name}[{index}]") for index, item in enumerate(value)))
    return _constraint("choice", json.dumps(choices, ensure_ascii=False), name)


_SYNTAXES = ("gbnf", "lark", "regex")


@described({"enum": list(_SYNTAXES)})
def _read_syntax(value: Any, name: str) -> str:
    if not isinstance(value, str) or value not in _SYNTAXES:
        raise invalid_value(name, value, '"gbnf", "lark" or "regex"')
    return value


_GRAMMAR: dict[str, Reader] = {"syntax": _read_syntax, "definition": _TEXT}


@described(any_of(schema_of(_TEXT), object_schema(_GRAMMAR, required=("syntax", "definition"))))
def read_grammar(value: Any, name: str) -> Constraint:
    """Read a grammar: its text in GBNF (with `::=`) or Lark, or `{"syntax", "definition"}`."""
    if isinstance(value, dict):
        fields = read_fields(value, _GRAMMAR, required=("syntax", "definition"), within=name)
        return _constraint(fields["syntax"], fields["definition"], name)
    definition = _TEXT(value, name)
    return _constraint("gbnf" if _GBNF_RULE.search(definition) else "lark", definition, name)


@described(schema_of(flag))
def read_any_object(value: Any, name: str) -> Constraint | None:
    """Read whether the output must be a JSON object."""
    return _constraint("json_schema", _ANY_OBJECT, name) if flag(value, name) else None


_NAMED_SCHEMA: dict[str, Reader] = {
    "name": text(64),
    "description": text(MAX_TEXT),
    "strict": flag,
    "schema": read_schema,
}


@described(object_schema(_NAMED_SCHEMA, required=("schema",)))
def _read_named_schema(value: Any, name: str) -> Constraint:
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object with "name" and "schema"')
    schema: Constraint = read_fields(value, _NAMED_SCHEMA, required=("schema",), within=name)["schema"]
    return schema


_JSON_SCHEMA: dict[str, Reader] = {"type": text(16), "schema": read_schema, "json_schema": _read_named_schema}


@described(
    {
        **object_schema(_JSON_SCHEMA, required=("type",)),
        "properties": {
            **object_schema(_JSON_SCHEMA)["properties"],
            "type": {"enum": ["text", "json_object", "json_schema"]},
        },
    }
)
def read_response_format(value: Any, name: str) -> Constraint | None:
    """Read OpenAI's `response_format`, and llama-server's with the schema beside the type."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"type": "json_object"}')
    kind = value.get("type")
    if kind == "text":
        read_fields(value, {"type": text(16)}, within=name)
        return None
    if kind == "json_object":
        fields = read_fields(value, {"type": text(16), "schema": read_schema}, within=name)
        return fields.get("schema") or _constraint("json_schema", _ANY_OBJECT, name)
    if kind != "json_schema":
        raise InvalidRequest(
            f'{name}.type is {show(kind)}; it must be "text", "json_object" or "json_schema"', f"{name}.type"
        )
    fields = read_fields(value, _JSON_SCHEMA, within=name)
    schemas = [fields[key] for key in ("schema", "json_schema") if key in fields]
    if len(schemas) != 1:
        raise InvalidRequest(f"{name} must have one schema, at {name}.json_schema.schema", f"{name}.json_schema")
    schema: Constraint = schemas[0]
    return schema


_STRUCTURED_OUTPUTS: dict[str, Reader] = {
    "json": read_schema,
    "json_object": read_any_object,
    "regex": read_regex,
    "choice": read_choice,
    "grammar": read_grammar,
}


@described(object_schema(_STRUCTURED_OUTPUTS))
def read_structured_outputs(value: Any, name: str) -> Constraint | None:
    """Read vLLM's `structured_outputs`."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"regex": "..."}')
    return only_one(*read_fields(value, _STRUCTURED_OUTPUTS, within=name).values())


CONSTRAINT_FIELDS: dict[str, Reader] = {
    "response_format": read_response_format,
    "json_schema": read_schema,
    "grammar": read_grammar,
    "regex": read_regex,
    "choice": read_choice,
    "structured_outputs": read_structured_outputs,
    "guided_json": read_schema,
    "guided_regex": read_regex,
    "guided_choice": read_choice,
    "guided_grammar": read_grammar,
}


def only_one(*values: Constraint | None) -> Constraint | None:
    """Return the constraint among the values of several fields. Raises `InvalidRequest` for several constraints."""
    found = [constraint for constraint in values if constraint is not None]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].field} and {found[1].field} both constrain the output; send one of them", found[1].field
        )
    return found[0] if found else None


def constraint_of(values: dict[str, Any]) -> Constraint | None:
    """The constraint among the values that were read with `CONSTRAINT_FIELDS`. Raises `InvalidRequest` for several."""
    if CONSTRAINT_FIELDS.keys().isdisjoint(values):
        return None
    return only_one(*[values[name] for name in CONSTRAINT_FIELDS if name in values])
