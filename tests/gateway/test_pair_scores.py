"""/v1/rerank and /v1/score of a model with a head of its own: prompts of pairs, scores, bounds, and what it refuses."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.peers import BOS, EOS, MODEL, hidden, make_tokenizer
from tests.gateway.server import Server

SEPARATOR = (BOS, EOS)


@pytest.fixture(scope="module")
def ranking(homes: Callable[[], Path]) -> Iterator[Server]:
    changes = {"pooling": "rank", "end_id": EOS, "pair_separator": SEPARATOR, "generates": False}
    running = Server(homes(), tokenizer=partial(make_tokenizer, **changes), scheduler={"max_step_tokens": 512})
    running.wait_ready()
    yield running
    assert running.close() == 0


def ids(first: str, second: str) -> list[int]:
    return [*first.encode(), *SEPARATOR, *second.encode(), EOS]


def expected(first: str, second: str) -> float:
    return float(hidden(array("i", ids(first, second)).tobytes(), "rank")[0])


def test_documents_are_ordered_by_the_models_scores(ranking: Server) -> None:
    documents = [f"document {i}" for i in range(30)]
    answer = ranking.post("/v1/rerank", {"query": "a query", "documents": documents}).json
    scores = [expected("a query", text) for text in documents]
    assert [item["index"] for item in answer["results"]] == sorted(range(30), key=lambda i: (-scores[i], i))
    assert [item["relevance_score"] for item in answer["results"]] == sorted(scores, reverse=True)
    assert answer["usage"]["total_tokens"] == sum(len(ids("a query", text)) for text in documents)
    frames = ranking.peers.generator.submitted
    assert {(frame.pooling, frame.max_tokens) for frame in frames} == {("rank", 1)}


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [("a", ["b", "c"], [("a", "b"), ("a", "c")]), (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")])],
)
def test_scores_of_pairs(ranking: Server, first: Any, second: Any, pairs: list[tuple[str, str]]) -> None:
    answer = ranking.post("/v1/score", {"text_1": first, "text_2": second}).json
    assert [item["score"] for item in answer["data"]] == [expected(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("rerank", {"query": "a" * 300, "documents": ["b", "c" * 300]}, "documents", r"documents\[1\] after query has"),
        ("rerank", {"query": "a" * 513, "documents": ["b"]}, "query", "query has 513 tokens; at most 512"),
        ("score", {"text_1": ["a"], "text_2": ["b" * 513]}, "text_2", r"text_2\[0\] has 513"),
        ("embeddings", {"input": "a"}, "model", "use /v1/rerank or /v1/score"),
    ],
)
def test_what_is_refused(ranking: Server, path: str, body: dict[str, Any], param: str, message: str) -> None:
    answer = ranking.post(f"/v1/{path}", body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert re.search(message, answer.error["message"]), answer.error


def test_all_pairs_of_a_request_are_bounded(homes: Callable[[], Path]) -> None:
    module = "stages.gateway.admission.pooled_prompts"
    running = Server(
        homes(),
        tokenizer=partial(make_tokenizer, pooling="rank", end_id=EOS, pair_separator=SEPARATOR),
        preamble=f"import {module}; {module}.MAX_PAIR_TOKENS = 60",
    )
    running.wait_ready()
    documents = ["b" * 7] * 3  # each pair has 20 tokens
    assert running.post("/v1/rerank", {"query": "a" * 10, "documents": documents}).status == 200
    answer = running.post("/v1/rerank", {"query": "a" * 10, "documents": [*documents, "c"]})
    assert (answer.status, answer.error["param"]) == (400, "documents")
    assert "up to documents[3] have 74 tokens; at most 60" in answer.error["message"]
    assert running.close() == 0


def test_another_pooling_is_refused_by_name(homes: Callable[[], Path]) -> None:
    tokenizer = partial(make_tokenizer, pooling="rank")
    models = [{"name": MODEL, "path": "x", "pooling": "mean"}]
    running = Server(homes(), tokenizer=tokenizer, models=models)
    running.wait_ready()
    answer = running.post("/v1/rerank", {"query": "a", "documents": ["b"]})
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "models[].pooling" in answer.error["message"]
    assert running.close() == 0
