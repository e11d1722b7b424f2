"""HTTP bodies: content coding, JSON, and the fields of every endpoint.

byte 0   low four bits: the reader; high four bits: the content coding
"""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from pipeline.api.error_response import error_response
from pipeline.api.json_body import to_json
from pipeline.errors import StarlingError
from stages.gateway.endpoints.body_readers import BODY_READERS, Body, read_request_body
from stages.gateway.http.parser_process import pack_ids
from tools.fuzz.target import Target

READERS = sorted(BODY_READERS)
CODINGS = ("", "gzip", "deflate", "br")
MAX_BODY = 1 << 20


def run(data: bytes) -> None:
    """Read a body as the gateway does, and encode the result for the processes that get it, or the error."""
    selector, body = data[:1] or b"\0", data[1:]
    reader = READERS[(selector[0] & 15) % len(READERS)]
    coding = CODINGS[(selector[0] >> 4) % len(CODINGS)]
    refusal = None
    try:
        result = read_request_body(Body(body, reader, "application/json", coding, MAX_BODY))
    except StarlingError as error:
        refusal = error
    if refusal is not None:
        response = error_response(refusal)
        assert 400 <= response.status < 500, f"status {response.status}: {refusal!r}"
        response.body.decode()
        return
    pickle.loads(pickle.dumps(pack_ids(result)))
    if isinstance(result, msgspec.Struct):
        msgspec.msgpack.encode(result)
    else:
        to_json(result)


def seeds() -> Iterator[bytes]:
    """A body for each reader with all kinds of fields."""
    common: dict[str, Any] = {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["a", "\n"],
        "logit_bias": {"3": -1.5},
        "n": 2,
        "stream": True,
    }
    bodies: dict[str, dict[str, Any]] = {
        "generate": {**common, "prompt": "x"},
        "chat": {
            **common,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "stream_options": {"include_usage": True},
            "response_format": {"type": "text"},
        },
        "completions": {**common, "prompt": ["a", "b"], "echo": True, "logprobs": 2},
        "session_close": {"model": "m", "session_id": "s"},
        "tokenize": {"model": "m", "text": "hello", "add_special_tokens": True},
        "detokenize": {"model": "m", "tokens": [1, 2, 3]},
        "object": {"a": [1, 2.5, None, True, "\ud83d\ude00", {"b": []}]},
    }
    for name, body in bodies.items():
        raw = json.dumps(body).encode()
        index = READERS.index(name)
        yield bytes([index]) + raw
        yield bytes([index | 16]) + gzip.compress(raw, mtime=0)
        yield bytes([index | 32]) + zlib.compress(raw)
    yield bytes([READERS.index("object")]) + rb'{"a":"\ud800"}'
    yield bytes([READERS.index("object")]) + b'{"a":' + b"[" * 90 + rb'"\udfff"' + b"]" * 90 + b"}"
    yield bytes([READERS.index("completions")]) + b'{"model":"m","prompt":[[1,2],[3]]}'


TARGET = Target(
    run,
    seeds,
    errors=(),
    modules=(
        "pipeline.api.content_coding",
        "pipeline.api.fields",
        "pipeline.api.generation_fields",
        "pipeline.api.json_body",
        "pipeline.api.requests.chat",
        "pipeline.api.requests.completions",
        "pipeline.api.requests.generate",
        "pipeline.api.requests.tokenize",
    ),
)
