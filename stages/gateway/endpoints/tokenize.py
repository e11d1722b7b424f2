"""POST /v1/tokenize and /v1/detokenize.

    {"model"?, "text", "add_special_tokens": false, "parse_special": false}
        -> {"model", "tokens": [ids], "offsets": [[begin, end], ...], "count"}
    {"model"?, "tokens": [ids], "skip_special_tokens": false} -> {"model", "text"}

Offsets are byte ranges `[begin, end)` of the text in UTF-8; a token that was added has `[0, 0)`.  With the defaults
detokenize is the inverse of tokenize.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pipeline.api.fields import FieldTable, flag, text, token_ids
from pipeline.api.generation_fields import MAX_PROMPT_IDS
from pipeline.api.json_body import to_json
from pipeline.errors import InvalidRequest
from pipeline.protocol import messages as m

SLICE_TOKENS = 16_384  # encoded at once: a few ms


class TokenizeRequest(msgspec.Struct):
    """A valid body of /v1/tokenize."""

    model: str
    text: str
    add_bos: bool
    parse_special: bool


class DetokenizeRequest(msgspec.Struct):
    """A valid body of /v1/detokenize."""

    model: str
    tokens: tuple[int, ...]
    skip_special: bool


TOKENIZE_BODY = FieldTable(
    {
        "model": text(256, empty=False),
        "text": text(1 << 30),
        "add_special_tokens": flag,
        "parse_special": flag,
    },
    ("text",),
)
DETOKENIZE_BODY = FieldTable(
    {
        "model": text(256, empty=False),
        "tokens": token_ids(MAX_PROMPT_IDS),
        "skip_special_tokens": flag,
    },
    ("tokens",),
)


def read_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    """Read the body of /v1/tokenize. Raises `InvalidRequest`."""
    values = TOKENIZE_BODY.read(body)
    return TokenizeRequest(
        values.get("model", ""),
        values["text"],
        values.get("add_special_tokens", False),
        values.get("parse_special", False),
    )


def tokenize_response(model: str, encoded: m.Encoded) -> Iterator[bytes]:
    """Yield the response in slices that take a few ms each, so that a million ranges do not block the event loop.

    Raises `InvalidRequest` for a text with too many tokens.
    """
    if encoded.too_many:
        count = encoded.too_many if encoded.is_exact else f"at least {encoded.too_many}"
        raise InvalidRequest(
            f"text has {count} tokens; at most {MAX_PROMPT_IDS} are allowed per request: send it in parts", "text"
        )
    tokens, ends = encoded.tokens, memoryview(encoded.offsets).cast("I")
    yield b'{"model":%b,"tokens":[' % to_json(model)
    for at in range(0, len(tokens), SLICE_TOKENS):
        yield (b"," if at else b"") + to_json(tokens[at : at + SLICE_TOKENS])[1:-1]
    yield b'],"offsets":['
    for at in range(0, len(ends), 2 * SLICE_TOKENS):
        pairs = iter(ends[at : at + 2 * SLICE_TOKENS].tolist())
        yield (b"," if at else b"") + to_json(list(zip(pairs, pairs)))[1:-1]
    yield b'],"count":%d}' % len(tokens)


def read_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    """Read the body of /v1/detokenize. Raises `InvalidRequest`."""
    values = DETOKENIZE_BODY.read(body)
    return DetokenizeRequest(values.get("model", ""), values["tokens"], values.get("skip_special_tokens", False))
