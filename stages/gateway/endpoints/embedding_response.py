"""The responses of POST /v1/embeddings: OpenAI's object, and the vectors in it."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.api.json_body import to_json
from pipeline.api.requests.embeddings import EmbeddingRequest


def with_end(tokens: tuple[int, ...], end_id: int) -> tuple[int, ...]:
    """Return a text's tokens with the one that ends a text to be embedded, once; -1: there is none."""
    return tokens if end_id < 0 or tokens[-1:] == (end_id,) else (*tokens, end_id)


def unit_vector(vector: bytes, dimensions: int | None = None) -> np.ndarray:
    """Return the first `dimensions` values of a vector (f32 bytes), scaled to length 1: f32; zeros stay zeros.

    The sum of squares is rounded once, so that the result does not depend on the CPU.
    """
    values = np.frombuffer(vector, "<f4")[:dimensions].astype(np.float64)
    length = math.sqrt(math.fsum((values * values).tolist()))
    return (values / length if length else values).astype("<f4")


def response_parts(model: str, vectors: list[bytes], n_tokens: int, request: EmbeddingRequest) -> Iterator[bytes]:
    """Yield the response in parts, one for each input. `vectors`: pooled hidden states, f32 bytes."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        unit = unit_vector(vector, request.dimensions)
        shown: Any = base64.b64encode(unit.tobytes()).decode() if request.is_base64 else unit.tolist()
        yield (b"," if index else b"") + to_json({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    yield b'],"model":%b,"usage":%b}' % (to_json(model), to_json(usage))
