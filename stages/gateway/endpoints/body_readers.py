"""From the bytes of a body to a valid request: one reader for each kind of endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from pipeline.api.body_names import names_of
from pipeline.api.content_coding import decompress
from pipeline.api.json_body import parse_array, parse_object
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.requests.readers import READERS, BodyReader
from pipeline.errors import StarlingError
from stages.gateway.endpoints.lora_adapters import read_load, read_scales, read_unload
from stages.gateway.tool_calls.parameter_types import parameter_types

BODY_READERS: dict[str, BodyReader] = {
    **READERS,
    "load_adapter": read_load,
    "unload_adapter": read_unload,
    "object": lambda body: body,
}
ARRAY_READERS: dict[str, Callable[[list[Any]], Any]] = {"adapter_scales": read_scales}


class Body(NamedTuple):
    """A request's body as it was received."""

    data: bytes | bytearray
    reader: str  # a key of BODY_READERS or ARRAY_READERS
    content_type: str
    coding: str  # Content-Encoding
    max_bytes: int  # without its coding


def read_request_body(body: Body) -> Any:
    """Return the result of the body's reader. Raises `StarlingError`, with the names in a body that is an object."""
    plain = decompress(bytes(body.data), body.coding, body.max_bytes)
    if body.reader in ARRAY_READERS:
        return ARRAY_READERS[body.reader](parse_array(plain, body.content_type))
    parsed = parse_object(plain, body.content_type)
    names = names_of(parsed)
    try:
        return _with_types(BODY_READERS[body.reader](parsed))
    except StarlingError as error:
        error.names = names
        raise


def _with_types(result: Any) -> Any:
    """Return the result with the types of its tools' parameters, which large schemas take long to give."""
    if not (isinstance(result, GenerationRequest) and result.tools and result.template):
        return result
    types = parameter_types(result.template.tools or ())
    return msgspec.structs.replace(result, tools=msgspec.structs.replace(result.tools, types=types))
