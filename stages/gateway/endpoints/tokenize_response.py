"""The response of POST /v1/tokenize, in slices."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.api.generation_fields import MAX_PROMPT_IDS
from pipeline.api.json_body import to_json
from pipeline.errors import InvalidRequest
from pipeline.protocol import messages as m

SLICE_TOKENS = 16_384  # encoded at once: a few ms


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
