"""POST /v1/tokenize and /v1/detokenize.

    {"model"?, "text", "add_special_tokens": false, "parse_special": false}
        -> {"model", "tokens": [ids], "offsets": [[begin, end], ...], "count"}
    {"model"?, "tokens": [ids], "skip_special_tokens": false} -> {"model", "text"}

Offsets are bytes of the text in UTF-8, `[begin, end)`; a token that was added is `[0, 0)`.
With the defaults, detokenize gives back exactly what tokenize was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pipeline.errors import InvalidRequest
from pipeline.protocol import messages as m
from stages.gateway.endpoints.formatter import to_json
from stages.gateway.endpoints.generation_request import MAX_PROMPT_IDS
from stages.gateway.http.fields import Reader, flag, read_fields, text, token_ids

_SLICE = 16_384  # tokens at once


class TokenizeRequest(msgspec.Struct):
    model: str
    text: str
    add_bos: bool
    parse_special: bool


class DetokenizeRequest(msgspec.Struct):
    model: str
    tokens: tuple[int, ...]
    skip_special: bool


_TOKENIZE: dict[str, Reader] = {
    "model": text(256, empty=False),
    "text": text(1 << 30),
    "add_special_tokens": flag,
    "parse_special": flag,
}
_DETOKENIZE: dict[str, Reader] = {
    "model": text(256, empty=False),
    "tokens": token_ids(MAX_PROMPT_IDS),
    "skip_special_tokens": flag,
}


def read_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    values = read_fields(body, _TOKENIZE, required=("text",))
    return TokenizeRequest(
        values.get("model", ""),
        values["text"],
        values.get("add_special_tokens", False),
        values.get("parse_special", False),
    )


def tokenized(model: str, encoded: m.Encoded) -> Iterator[bytes]:
    """The answer as JSON, in pieces of some ms: a million ranges are no million objects. Raises `InvalidRequest`."""
    if encoded.too_many:
        count = encoded.too_many if encoded.is_exact else f"at least {encoded.too_many}"
        raise InvalidRequest(
            f"text has {count} tokens; at most {MAX_PROMPT_IDS} are taken at once: send it in parts", "text"
        )
    tokens, ends = encoded.tokens, memoryview(encoded.offsets).cast("I")
    yield b'{"model":%b,"tokens":[' % to_json(model)
    for at in range(0, len(tokens), _SLICE):
        yield (b"," if at else b"") + to_json(tokens[at : at + _SLICE])[1:-1]
    yield b'],"offsets":['
    for at in range(0, len(ends), 2 * _SLICE):
        pairs = iter(ends[at : at + 2 * _SLICE].tolist())
        yield (b"," if at else b"") + to_json(list(zip(pairs, pairs)))[1:-1]
    yield b'],"count":%d}' % len(tokens)


def read_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    values = read_fields(body, _DETOKENIZE, required=("tokens",))
    return DetokenizeRequest(values.get("model", ""), values["tokens"], values.get("skip_special_tokens", False))
