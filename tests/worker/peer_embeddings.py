"""Embeddings from llama.cpp (the wheel `xllamacpp`, `make peers`), in a child process.

    python -m tests.worker.peer_embeddings MODEL.gguf POOLING < inputs.json

reads a list of inputs (lists of token ids) and writes a list of vectors of length 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def peer_embeddings(model: Path, inputs: Sequence[Sequence[int]], pooling: str, python: str = "") -> np.ndarray:
    """(len(inputs), width) f64. `pooling`: mean, cls or last."""
    done = subprocess.run(
        [python or sys.executable, "-m", "tests.worker.peer_embeddings", str(model), pooling],
        input=json.dumps([[int(token) for token in one] for one in inputs]),
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
    vectors = []
    for given in json.load(sys.stdin):
        answer = server.handle_embeddings({"input": given, "model": "m", "encoding_format": "float"})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        vectors.append(answer["data"][0]["embedding"])
    answers.write(json.dumps(vectors) + "\n")
    answers.flush()
    os._exit(0)  # the library's own shutdown waits for its HTTP threads


if __name__ == "__main__":
    main()
