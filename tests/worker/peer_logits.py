"""Logarithms of probabilities from llama.cpp (the wheel `xllamacpp`, `make peers`), in a child process.

    python -m tests.worker.peer_logits MODEL.gguf CONTEXT [ADAPTER.gguf] < prompts.json

reads a list of prompts (lists of token ids) and writes one list for each: ln P of every token id after the prompt.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PRINTABLE = 35  # the token "A" of the vocabularies of tools/tiny_gguf.py


def is_installed() -> bool:
    """Whether there is a llama.cpp to compare with."""
    return importlib.util.find_spec("xllamacpp") is not None


def peer_logprobs(
    model: Path, prompts: Sequence[Sequence[int]], context: int, adapter: Path | None = None
) -> np.ndarray:
    """(len(prompts), vocab) f64."""
    arguments = [str(model), str(context), *([str(adapter)] if adapter is not None else [])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.peer_logits", *arguments],
        input=json.dumps([[int(token) for token in prompt] for prompt in prompts]),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def _logprobs(server: Any, prompt: list[int]) -> list[float]:
    """All of them after one prompt: with n_probs the server lists tokens by their probability before any sampler.

    The token that is sampled is a whole character: behind half of one the list would be kept back.
    """
    answer = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": 1,
            "n_probs": 1 << 20,
            "temperature": 0.0,
            "cache_prompt": False,
            "logit_bias": [[PRINTABLE, 1000.0]],
        }
    )
    answer = json.loads(answer) if isinstance(answer, str) else answer
    listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    found = {entry["id"]: entry["logprob"] for entry in listed}
    return [found[i] for i in range(len(found))]


def main() -> None:
    """Answer on the original standard output; what the library prints goes to standard error."""
    import xllamacpp

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel = int(sys.argv[2]), 1
    params.cache_ram_mib = 0
    params.warmup = False
    if sys.argv[3:]:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = sys.argv[3], 1.0
        params.lora_adapters = [adapter]
    server = xllamacpp.Server(params)
    answers.write(json.dumps([_logprobs(server, prompt) for prompt in json.load(sys.stdin)]) + "\n")
    answers.flush()
    os._exit(0)  # the library's own shutdown waits for its HTTP threads


if __name__ == "__main__":
    main()
