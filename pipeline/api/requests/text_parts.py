"""Contents that are texts in parts, in OpenAI's chats and responses: `[{"type": "text", "text": ...}]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.api.fields import Reader, invalid_value, object_schema, one_of, read_fields, show, text
from pipeline.api.json_schema import any_of, array_of, described
from pipeline.errors import InvalidRequest

MAX_CHARACTERS = 1 << 30  # of a part; the size of the body is the actual bound


def text_parts(*kinds: str, more: Mapping[str, Reader] | None = None, accepts_string: bool = True) -> Reader:
    """Return the reader of an array of parts of these types, whose texts are joined.

    `more`: further fields of a part. `accepts_string`: a string is read, too, and means one part.
    """
    table: dict[str, Reader] = {"type": one_of(*kinds), "text": text(MAX_CHARACTERS), **(more or {})}
    schema = array_of(object_schema(table, required=("type", "text")))
    form = f'{{"type": "{kinds[0]}", "text": ...}}'

    @described(any_of({"type": "string"}, schema) if accepts_string else schema)
    def read(value: Any, name: str) -> str:
        if accepts_string and isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise invalid_value(name, value, f"{'a string or ' if accepts_string else ''}an array of {form}")
        return "".join(_read_part(part, f"{name}[{index}]") for index, part in enumerate(value))

    def _read_part(value: Any, name: str) -> str:
        if not isinstance(value, dict):
            raise invalid_value(name, value, f"an object {form}")
        if accepts_string and value.get("type") not in kinds:  # an image, for example
            where = f"{name}.type"
            raise InvalidRequest(f"{where} is {show(value.get('type'))}; this server accepts text only", where)
        part: str = read_fields(value, table, required=("type", "text"), within=name)["text"]
        return part

    return read
