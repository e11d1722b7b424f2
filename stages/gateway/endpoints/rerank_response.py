"""The responses of POST /v1/rerank and /v1/score: scores are the cosines of embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pipeline.api.requests.rerank import RerankRequest


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of two vectors of length 1 (f32), the exact sum of products rounded once."""
    products = one.astype(np.float64) * other.astype(np.float64)
    return min(1.0, max(-1.0, math.fsum(products.tolist())))


def rerank_response(model: str, scores: list[float], n_tokens: int, request: RerankRequest) -> dict[str, Any]:
    """Return the body of the response. `scores`: of each document."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: request.top_n]
    results = []
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.returns_documents:
            result["document"] = {"text": request.documents[index]}
        results.append(result)
    return {"object": "list", "model": model, "results": results, "usage": _usage(n_tokens)}


def score_response(model: str, scores: list[float], n_tokens: int) -> dict[str, Any]:
    """Return the body of the response. `scores`: of each pair."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {"object": "list", "model": model, "data": data, "usage": _usage(n_tokens)}


def _usage(n_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
