"""Embeddings and scores of pairs from llama.cpp (the wheel `xllamacpp`, `make peers`), in a child process.

    python -m tests.worker.peer_embeddings MODEL.gguf POOLING < inputs.json

reads a list of inputs (lists of token ids) and writes a list of vectors of length 1; with the pooling `rank` it reads
`{"query", "documents"}` and writes a score of each document.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def peer_embeddings(model: Path, inputs: Sequence[Sequence[int]], pooling: str, python: str = "") -> np.ndarray:
    """(len(inputs), width) f64. `pooling`: mean, cls or last."""
    return _ask(model, pooling, [[int(token) for token in one] for one in inputs], python)


def peer_scores(model: Path, query: str, documents: Sequence[str]) -> np.ndarray:
    """(len(documents),) f64: the scores of the model's head."""
    return _ask(model, "rank", {"query": query, "documents": list(documents)})


def _ask(model: Path, pooling: str, given: Any, python: str = "") -> np.ndarray:
    done = subprocess.run(
        [python or sys.executable, "-m", "tests.worker.peer_embeddings", str(model), pooling],
        input=json.dumps(given),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Answer on the original standard output; what the library prints goes to standard error."""
    import xllamacpp

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.n_batch, params.n_ubatch = 1024, 1, 1024, 1024
    params.embedding = True
    params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{sys.argv[2].upper()}")
    params.cache_ram_mib = 0
    params.warmup = False
    server = xllamacpp.Server(params)

    def call(handle: Callable[[Any], Any], body: Any) -> Any:
        answer = handle(body)
        return json.loads(answer) if isinstance(answer, str) else answer

    given = json.load(sys.stdin)
    if sys.argv[2] == "rank":
        results = sorted(call(server.handle_rerank, given)["results"], key=lambda result: result["index"])
        found = [result["relevance_score"] for result in results]
    else:
        bodies = [{"input": one, "model": "m", "encoding_format": "float"} for one in given]
        found = [call(server.handle_embeddings, body)["data"][0]["embedding"] for body in bodies]
    answers.write(json.dumps(found) + "\n")
    answers.flush()
    os._exit(0)  # the library's own shutdown waits for its HTTP threads


if __name__ == "__main__":
    main()
