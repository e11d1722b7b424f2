"""POST /v1/embeddings: reads OpenAI's parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.api.fields import FieldTable, integer, invalid_value, schema_of, text, token_ids
from pipeline.api.generation_fields import MAX_MODEL_CHARACTERS, MAX_PROMPT_IDS, read_keep_alive
from pipeline.api.json_schema import any_of, array_of, described, string
from pipeline.api.requests.generation_request import TextOrIds
from pipeline.errors import InvalidRequest

MAX_INPUTS = 2048  # OpenAI's bound
MAX_TEXT_CHARACTERS = 1 << 30  # in a field; the size of the body is the actual bound
MAX_DIMENSIONS = 1 << 24  # in the field; the model's width is the actual bound
_INPUT_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """A valid body of /v1/embeddings."""

    model: str  # "": the first model
    inputs: list[TextOrIds]
    is_base64: bool
    dimensions: int | None
    keep_alive: float | None = None  # how long the model stays loaded, s; negative: for good


def input_names(inputs: list[TextOrIds]) -> list[str]:
    """Return the names of the inputs, for error messages."""
    return [f"input[{index}]" for index in range(len(inputs))] if len(inputs) > 1 else ["input"]


_TEXT = string(MAX_TEXT_CHARACTERS, least=1)
_IDS = {**schema_of(token_ids(MAX_PROMPT_IDS)), "minItems": 1}


@described(any_of(_TEXT, array_of(_TEXT, least=1, most=MAX_INPUTS), _IDS, array_of(_IDS, least=1, most=MAX_INPUTS)))
def read_inputs(value: Any, name: str) -> list[TextOrIds]:
    """Read any of OpenAI's four kinds of input as a list of texts or of arrays of token ids."""
    ids = token_ids(MAX_PROMPT_IDS)
    if isinstance(value, str):
        return [_filled(value, name)]
    if not isinstance(value, list):
        raise invalid_value(name, value, _INPUT_KINDS)
    if value and isinstance(value[0], int) and not isinstance(value[0], bool):
        return [ids(value, name)]
    if not 1 <= len(value) <= MAX_INPUTS:
        raise InvalidRequest(
            f"{name} has {len(value)} inputs; it must have 1 to {MAX_INPUTS}: send several requests", name
        )
    inputs: list[TextOrIds] = []
    total = 0
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            raise invalid_value(where, item, f"of the same kind as the first: {name} is {_INPUT_KINDS}")
        inputs.append(_filled(item if isinstance(item, str) else ids(item, where), where))
        total += 0 if isinstance(item, str) else len(item)
    if total > MAX_PROMPT_IDS:
        raise InvalidRequest(f"{name} has {total} token ids; at most {MAX_PROMPT_IDS} are allowed", name)
    return inputs


def _filled(value: TextOrIds, name: str) -> TextOrIds:
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one character or token", name)
    return value


@described({"enum": ["float", "base64"]})
def _read_format(value: Any, name: str) -> bool:
    """Return whether the format is base64."""
    if value not in ("float", "base64"):
        raise invalid_value(name, value, '"float" or "base64"')
    return bool(value == "base64")


BODY = FieldTable(
    {
        "model": text(MAX_MODEL_CHARACTERS, empty=False),
        "input": read_inputs,
        "encoding_format": _read_format,
        "dimensions": integer(1, MAX_DIMENSIONS),
        "keep_alive": read_keep_alive,
        "user": text(512),  # accepted for compatibility, without effect
    },
    ("input",),
)


def read(body: dict[str, Any]) -> EmbeddingRequest:
    """Read the body of /v1/embeddings. Raises `InvalidRequest`."""
    values = BODY.read(body)
    return EmbeddingRequest(
        values.get("model", ""),
        values["input"],
        values.get("encoding_format", False),
        values.get("dimensions"),
        values.get("keep_alive"),
    )
