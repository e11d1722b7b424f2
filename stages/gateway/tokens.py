"""POST /v1/tokenize and /v1/detokenize.

    {"model"?, "text", "add_special_tokens": false, "parse_special": false}
        -> {"model", "tokens": [ids], "offsets": [[begin, end], ...], "count"}
    {"model"?, "tokens": [ids], "skip_special_tokens": false} -> {"model", "text"}

Offsets are bytes of the text in UTF-8, `[begin, end)`; a token that was added is `[0, 0)`.
With the defaults, detokenize gives back exactly what tokenize was given.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stages.gateway.ask import MAX_PROMPT_IDS
from stages.gateway.fields import Reader, flag, read_fields, text, token_ids


class TokenizeAsk(msgspec.Struct):
    model: str
    text: str
    add_bos: bool
    parse_special: bool


class DetokenizeAsk(msgspec.Struct):
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


def read_tokenize(body: dict[str, Any]) -> TokenizeAsk:
    values = read_fields(body, _TOKENIZE, required=("text",))
    return TokenizeAsk(
        values.get("model", ""),
        values["text"],
        values.get("add_special_tokens", False),
        values.get("parse_special", False),
    )


def read_detokenize(body: dict[str, Any]) -> DetokenizeAsk:
    values = read_fields(body, _DETOKENIZE, required=("tokens",))
    return DetokenizeAsk(
        values.get("model", ""), values["tokens"], values.get("skip_special_tokens", False)
    )
