"""Models of embeddings and of scores alone behind a server: both are the reference's; endpoints for text refuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm.step_ring import POOL_SCALE
from stages.gateway.endpoints.embedding_response import unit_vector
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server
from tests.tokenizer.trained import unigram_spec
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.tiny_gguf import SHAPES, WORDPIECE_SPECIALS, write_model
from tools.vocabulary_gguf import add_vocabulary

pytestmark = pytest.mark.slow

MODELS = ("bert", "nomic-bert", "xlm-r")
STEP_TOKENS = 64
CORES = sorted(os.sched_getaffinity(0))
CLS, SEP = (WORDPIECE_SPECIALS.index(name) for name in ("[CLS]", "[SEP]"))
UNIGRAM = unigram_spec()
# What a text is between.
ENDS = {"bert": (CLS, SEP), "nomic-bert": (CLS, SEP), "xlm-r": (UNIGRAM.bos, UNIGRAM.eos)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    files = {name: write_model(directory / f"{name}.gguf", SHAPES[name], "Q4_0", seed=2) for name in MODELS[:2]}
    shape = SHAPES["bert"]._replace(vocab_size=len(UNIGRAM.tokens))
    add_keys = partial(add_vocabulary, spec=UNIGRAM)
    files["reranker"] = write_model(directory / "reranker.gguf", SHAPES["reranker"], "Q4_0_M", seed=2)
    files["xlm-r"] = write_model(directory / "xlm-r.gguf", shape, "Q4_0", seed=2, add_vocabulary=add_keys)
    return files


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("bert")
    share_caches(home)
    models = [
        {"name": name, "path": str(path), "kv_cache_mb": 32, "cpus": CORES[i % len(CORES) :][:1], "max_batch_size": 4}
        for i, (name, path) in enumerate(files.items())
    ]
    with Server(home, {"models": models, "scheduler": {"max_step_tokens": STEP_TOKENS}}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def expected(path: Path, tokens: list[int]) -> list[float]:
    """The embedding by the reference: the mean of all positions."""
    hidden = ExactSequence(ExactModel(path)).hidden(tokens).astype(np.float64)
    total = np.rint(hidden * 2.0**POOL_SCALE).astype(np.int64).sum(axis=0)
    vector = (total.astype(np.float64) / (len(tokens) * 2.0**POOL_SCALE)).astype("<f4")
    return list(unit_vector(vector.tobytes()))


@pytest.mark.parametrize("model", MODELS)
def test_embeddings_are_what_the_reference_computes(server: Server, files: dict[str, Path], model: str) -> None:
    texts = ["The quick brown fox", "jumps over the lazy dog!", "a"]
    answer = server.post("/v1/embeddings", model=model, input=texts)
    for text, found in zip(texts, answer["data"], strict=True):
        tokens = server.post("/v1/tokenize", model=model, text=text)["tokens"]
        first, last = ENDS[model]
        ids = tokens if tokens[:1] == [first] else [first, *tokens]
        assert found["embedding"] == pytest.approx(expected(files[model], [*ids, last]), abs=0)
    alone = server.post("/v1/embeddings", model=model, input=texts[1])["data"][0]["embedding"]
    assert alone == answer["data"][1]["embedding"]


def test_rerank_orders_by_the_vectors(server: Server) -> None:
    documents = ["the warm sun of the afternoon", "the quick fox", "one two three"]
    ranked = server.post("/v1/rerank", model="bert", query="the quick fox", documents=documents)["results"]
    assert (ranked[0]["index"], len(ranked)) == (1, 3)


def test_a_reranker_gives_the_scores_that_the_reference_computes(server: Server, files: dict[str, Path]) -> None:
    def ids(text: str) -> list[int]:
        tokens: list[int] = server.post("/v1/tokenize", model="reranker", text=text)["tokens"]
        return tokens[1:] if tokens[:1] == [CLS] else tokens

    query, documents = "the quick fox", ["the warm sun of the afternoon", "the quick fox", "one two three"]
    expected = []
    for document in documents:
        tokens = [CLS, *ids(query), SEP, *ids(document), SEP]
        score = ExactSequence(ExactModel(files["reranker"])).score(tokens)
        expected.append(float(np.float32(round(float(score) * 2.0**POOL_SCALE) / 2.0**POOL_SCALE)))
    ranked = server.post("/v1/rerank", model="reranker", query=query, documents=documents)["results"]
    assert [result["relevance_score"] for result in ranked] == sorted(expected, reverse=True)
    assert [result["index"] for result in ranked] == np.argsort(expected)[::-1].tolist()
    scored = server.post("/v1/score", model="reranker", text_1=query, text_2=documents)["data"]
    assert [one["score"] for one in scored] == expected


TEXTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/generate": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/responses": {"input": "a"},
}


@pytest.mark.parametrize("path", TEXTS)
def test_endpoints_for_text_refuse(server: Server, path: str) -> None:
    status, body, _ = server.request("POST", path, TEXTS[path] | {"model": "bert"})
    assert status == 400
    assert "model 'bert' has embeddings alone and generates no text" in str(body)


def test_an_input_must_fit_in_one_step(server: Server) -> None:
    longest = {"model": "bert", "input": [5] * STEP_TOKENS}
    assert len(server.post("/v1/embeddings", **longest)["data"]) == 1
    status, body, _ = server.request("POST", "/v1/embeddings", longest | {"input": [5] * (STEP_TOKENS + 1)})
    assert status == 400
    bound = "at most 64 are allowed (which the model computes in one step: scheduler.max_step_tokens)"
    assert f"input has 65 tokens; {bound}" in str(body)
