"""POST /v1/tokenize and /v1/detokenize.

    {"model"?, "text", "add_special_tokens": false, "parse_special": false}
        -> {"model", "tokens": [ids], "offsets": [[begin, end], ...], "count"}
    {"model"?, "tokens": [ids], "skip_special_tokens": false} -> {"model", "text"}

Offsets are byte ranges `[begin, end)` of the text in UTF-8; a token that was added has `[0, 0)`.  With the defaults
detokenize is the inverse of tokenize.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.api.fields import FieldTable, flag, text, token_ids
from pipeline.api.generation_fields import MAX_PROMPT_IDS


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


def read_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    """Read the body of /v1/detokenize. Raises `InvalidRequest`."""
    values = DETOKENIZE_BODY.read(body)
    return DetokenizeRequest(values.get("model", ""), values["tokens"], values.get("skip_special_tokens", False))
