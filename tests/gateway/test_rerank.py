"""/v1/rerank and /v1/score: scores, order, bounds and errors."""

from __future__ import annotations

import math
import re
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.requests.embeddings import MAX_INPUTS
from pipeline.api.requests.rerank import ScoreRequest
from stages.gateway.endpoints.embedding_response import unit_vector
from stages.gateway.endpoints.rerank_response import cosine
from tests.gateway.peers import CONTEXT, MODEL, hidden
from tests.gateway.server import Server

TEXTS = [f"document {i}" for i in range(20)]


def expected(one: str, other: str) -> float:
    first, second = (
        hidden(array("i", list(text.encode())).tobytes(), "last").astype(np.float64) for text in (one, other)
    )
    return float(first @ second / math.sqrt((first @ first) * (second @ second)))


def test_the_best_documents_come_first(server: Server) -> None:
    scores = [expected("query", text) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    for top, documents in ((None, TEXTS), (3, [{"text": text} for text in TEXTS]), (50, TEXTS)):
        body = {"model": MODEL, "query": "query", "documents": documents, "top_n": top, "return_documents": top == 3}
        answer = server.post("/v1/rerank", body).json
        results = answer["results"]
        assert [result["index"] for result in results] == order[:top]
        assert [result["relevance_score"] for result in results] == pytest.approx(
            [scores[i] for i in order[:top]], abs=1e-6
        )
        if top == 3:
            assert [result["document"]["text"] for result in results] == [TEXTS[i] for i in order[:3]]
        n = 5 + sum(map(len, TEXTS))
        assert (answer["model"], answer["usage"]) == (MODEL, {"prompt_tokens": n, "total_tokens": n})


def test_equal_documents_keep_their_order(server: Server) -> None:
    answer = server.post("/v1/rerank", {"query": "query", "documents": ["same", "query", "same", "same"]}).json
    assert [result["index"] for result in answer["results"]] == [1, 0, 2, 3]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "b"], "c", [("a", "c"), ("b", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
        (["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
    ],
)
def test_scores_of_pairs(server: Server, first: Any, second: Any, pairs: list[tuple[str, str]]) -> None:
    answer = server.post("/v1/score", {"text_1": first, "text_2": second}).json
    assert [item["score"] for item in answer["data"]] == pytest.approx([expected(*pair) for pair in pairs], abs=1e-6)
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(len(pairs))]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("rerank", {"documents": ["a"]}, "query", "missing"),
        ("rerank", {"query": "a"}, "documents", "missing"),
        ("rerank", {"query": "", "documents": ["a"]}, "query", "0 characters"),
        ("rerank", {"query": "a", "documents": []}, "documents", "0 texts"),
        ("rerank", {"query": "a", "documents": ["b"] * MAX_INPUTS}, "documents", str(MAX_INPUTS - 1)),
        ("rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "0 characters"),
        ("rerank", {"query": "a", "documents": [{"text": 5}]}, "documents[0].text", "string"),
        ("rerank", {"query": "a", "documents": [5]}, "documents[0]", "string"),
        ("rerank", {"query": "a", "documents": ["b", "c" * (CONTEXT + 1)]}, "documents", r"documents\[1\] has"),
        ("rerank", {"query": "a" * (CONTEXT + 1), "documents": ["b"]}, "query", "query has"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "whole number"),
        ("score", {"text_1": "a"}, "text_2", "missing"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "same number"),
        ("score", {"text_1": "a", "text_2": 7}, "text_2", "array"),
        ("score", {"text_1": ["a"] * 1500, "text_2": ["b"] * 1500}, "text_2", "3000 texts"),
    ],
)
def test_errors_name_the_field(server: Server, path: str, body: dict[str, Any], param: str, message: str) -> None:
    answer = server.post(f"/v1/{path}", body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert re.search(message, answer.error["message"]), answer.error


@given(st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4), st.floats(-100, 100, width=32))
def test_a_cosine_is_within_its_range_and_symmetric(values: list[float], factor: float) -> None:
    one = unit_vector(np.array(values, "<f4").tobytes())
    other = unit_vector((np.array(values, "<f4") * np.float32(factor)).astype("<f4").tobytes())
    assert -1 <= cosine(one, other) == cosine(other, one) <= 1


@given(st.integers(1, 9), st.booleans(), st.booleans())
def test_each_pair_has_a_text_of_each_side(n: int, is_first_single: bool, is_second_single: bool) -> None:
    first = ["a"] * (1 if is_first_single else n)
    request = ScoreRequest("", first, ["b"] * (1 if is_second_single else n))
    assert len(request.names) == len(request.texts)
    assert len(request.pairs) == max(len(first), len(request.second))
    assert all(request.texts[i] == "a" and request.texts[j] == "b" for i, j in request.pairs)
