"""Models of several architectures behind one server: what clients receive is what the reference implementation says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.models import registry
from shm.step_ring import POOL_SCALE
from stages.gateway.endpoints.embedding_response import unit_vector
from stages.worker.checkpoint.prepare_source import prepare_source
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.tiny_gguf import SHAPES, write_model
from tools.tiny_hf import write_directory

pytestmark = pytest.mark.slow

# Together they use every switch: windows and tables of their own, caps, fused tensors, learned positions, experts.
MODELS = ("gemma2", "gemma3", "phi3", "gpt2", "qwen2moe")
DIRECTORY = "qwen3"  # a Hugging Face directory, which has a name and no GGUF file
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: write_model(directory / f"{name}.gguf", SHAPES[name], "Q4_0", seed=2) for name in MODELS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("architectures")
    share_caches(home)
    models = [
        {"name": name, "path": str(path), "kv_cache_mb": 32, "cpus": CORES[i % len(CORES) :][:1], "max_batch_size": 4}
        for i, (name, path) in enumerate(files.items())
    ]
    models.append({"name": DIRECTORY, "kv_cache_mb": 32, "cpus": CORES[:1], "max_batch_size": 4})
    source = write_model(home / "source.gguf", SHAPES[DIRECTORY], "F16", seed=2)
    index = prepare_source(write_directory(source, home / "directory"), make_directory(home / "models"))
    files[DIRECTORY] = source
    record = registry.Record(DIRECTORY, index.digest, index.bin_bytes, str(home / "directory"), is_checkpoint=True)
    registry.write(home / "models", DIRECTORY, record)
    with Server(home, {"models": models}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def greedy(path: Path, prompt: list[int], n: int) -> list[int]:
    sequence = ExactSequence(ExactModel(path))
    logits, found = sequence.extend(prompt, last_only=True), []
    for _ in range(n):
        found.append(int(logits[0].argmax()))
        logits = sequence.extend(found[-1:], last_only=True)
    return found


def make_directory(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("model", [*MODELS, DIRECTORY])
def test_a_server_answers_what_the_reference_computes(server: Server, files: dict[str, Path], model: str) -> None:
    prompt = np.random.default_rng(1).integers(3, 260, 310).tolist()  # beyond the windows
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/generate", **body)["choices"][0]
    assert answer["tokens"] == greedy(files[model], prompt, 12)
    again = server.post("/v1/generate", **body)["choices"][0]  # over cached pages
    assert again["tokens"] == answer["tokens"]
    chat = {"model": model, "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 8}
    assert server.post("/v1/chat/completions", **chat)["usage"]["completion_tokens"] >= 1
    shown = server.request("GET", f"/v1/models/{model}")[1]
    assert shown["architecture"] == SHAPES[model].architecture


def pooled(path: Path, prompt: list[int]) -> list[float]:
    """The embedding by the reference: of the last position."""
    last = ExactSequence(ExactModel(path)).hidden(prompt)[-1].astype(np.float64)
    whole = np.rint(last * 2.0**POOL_SCALE) / 2.0**POOL_SCALE
    values: list[float] = unit_vector(whole.astype("<f4").tobytes()).tolist()
    return values


@pytest.mark.parametrize("model", MODELS)
def test_embeddings_are_what_the_reference_computes(server: Server, files: dict[str, Path], model: str) -> None:
    draws = np.random.default_rng(3)
    inputs = [draws.integers(3, 260, n).tolist() for n in (60, 1, 17)]
    answer = server.post("/v1/embeddings", model=model, input=inputs)
    assert [item["embedding"] for item in answer["data"]] == [pooled(files[model], one) for one in inputs]
    assert answer["usage"]["total_tokens"] == 78
