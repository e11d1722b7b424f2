"""Embeddings of a real server: beside streams, in any batch, and while stages are killed."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.comparison import comparable, process
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

WORDS = ("the keeper", "of the light", "counts ships", "and stars", "and writes", "their names")
INPUTS = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(30)) for i in range(len(WORDS))]
STREAM: dict[str, Any] = {"prompt": "The sea", "max_tokens": 60, "seed": 4, "temperature": 0.8, "ignore_eos": True}


def embed(server: Server, inputs: Any) -> list[str]:
    answer = server.post("/v1/embeddings", model=DEMO_MODEL, input=inputs, encoding_format="base64")
    return [item["embedding"] for item in answer["data"]]


def test_deaths_of_all_stages_change_no_byte_of_a_vector_or_a_stream(demo_server: Server) -> None:
    alone = [embed(demo_server, text)[0] for text in INPUTS]
    assert len(set(alone)) == len(INPUTS)
    expected = comparable(list(demo_server.stream("/v1/generate", **STREAM)))
    found: list[list[str]] = []
    is_over = threading.Event()

    def embed_all_the_time() -> None:
        while not is_over.is_set():
            found.append(embed(demo_server, INPUTS))

    thread = threading.Thread(target=embed_all_the_time)
    thread.start()
    events: list[dict[str, Any]] = []
    names = ("worker/1", "kv", "scheduler", "tokenizer")
    n_tokens = killed = 0
    for event in demo_server.stream("/v1/generate", **STREAM):
        events.append(event)
        n_tokens += len(event.get("tokens", ()))  # an event may have several
        if killed < len(names) and n_tokens > 12 * killed + 2:
            os.kill(demo_server.pid_of(process(names[killed], DEMO_MODEL)), signal.SIGKILL)
            killed += 1
    is_over.set()
    thread.join(300)
    assert killed == len(names)
    assert comparable(events) == expected
    assert found
    assert all(vectors == alone for vectors in found)


def test_texts_of_one_meaning_are_nearer_than_others(demo_server: Server) -> None:
    answer = demo_server.post("/v1/embeddings", input=["a small dog", "a little dog", "the stock market fell sharply"])
    one, same, other = (item["embedding"] for item in answer["data"])
    assert abs(sum(value * value for value in one) - 1) < 1e-5

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert cosine(one, same) > cosine(one, other)
