"""Bodies by which other servers' clients manage LoRA adapters: vLLM's two endpoints, and llama-server's list.

vLLM names an adapter once for the server; here it belongs to a model, so that `lora_name` may be MODEL:NAME.
llama-server sets a scale for the requests that name no adapter; here those are computed by the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.api.fields import FieldTable, Unsupported, flag, integer, number, read_fields, show, text
from pipeline.api.json_schema import Schema, array_of
from pipeline.errors import InvalidRequest

MAX_NAME = 256  # characters of MODEL:NAME
MAX_PATH = 4096  # characters
MAX_SCALES = 64  # entries of llama-server's list: as many as a model has adapters
MAX_ID = 2**31 - 1
MAX_SCALE = 1e6

LOAD_BODY = FieldTable(
    {"lora_name": text(MAX_NAME, empty=False), "lora_path": text(MAX_PATH, empty=False), "load_inplace": flag},
    ("lora_name", "lora_path"),
    {"is_3d_lora_weight": Unsupported(False, hint="adapters of experts cannot be loaded")},
)
UNLOAD_BODY = FieldTable(
    {"lora_name": text(MAX_NAME, empty=False)},
    ("lora_name",),
    {"lora_int_id": Unsupported(hint="lora_name says which adapter it is")},
)
_SCALE = {"id": integer(0, MAX_ID), "scale": number(-MAX_SCALE, MAX_SCALE)}


class LoadAdapter(NamedTuple):
    """A body of `/v1/load_lora_adapter`. `is_replacing`: an adapter of that name is replaced, and not refused."""

    name: str
    path: str
    is_replacing: bool


def read_load(body: dict[str, Any]) -> LoadAdapter:
    """Read a body of `/v1/load_lora_adapter`. Raises `InvalidRequest`."""
    values = LOAD_BODY.read(body)
    return LoadAdapter(values["lora_name"], values["lora_path"], values.get("load_inplace", False))


def read_unload(body: dict[str, Any]) -> str:
    """Read a body of `/v1/unload_lora_adapter`: the adapter's name. Raises `InvalidRequest`."""
    name: str = UNLOAD_BODY.read(body)["lora_name"]
    return name


def read_scales(body: Sequence[Any]) -> tuple[int, ...]:
    """Read a body of `POST /lora-adapters`: the ids of adapters, whose scale is 0. Raises `InvalidRequest`."""
    if len(body) > MAX_SCALES:
        raise InvalidRequest(f"the body has {len(body)} adapters; at most {MAX_SCALES} are allowed")
    ids = []
    for index, entry in enumerate(body):
        where = f"[{index}]"
        if not isinstance(entry, dict):
            raise InvalidRequest(f"{where} is {show(entry)}; it must be an object with id and scale", where)
        values = read_fields(entry, _SCALE, required=("id", "scale"), within=where)
        if values["scale"]:
            raise InvalidRequest(
                f"{where}.scale is {show(entry['scale'])}; it must be 0, because no adapter changes requests that do "
                f"not name it: ask for NAME:ADAPTER as their model, with the scale of the adapter's file",
                f"{where}.scale",
            )
        ids.append(values["id"])
    return tuple(ids)


def scales_schema() -> Schema:
    """Return the JSON Schema of the bodies that `read_scales` accepts."""
    entry: Schema = {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": MAX_ID}, "scale": {"const": 0}},
        "required": ["id", "scale"],
        "additionalProperties": False,
    }
    return array_of(entry, most=MAX_SCALES)
