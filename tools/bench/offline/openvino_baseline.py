"""OpenVINO GenAI, which reads GGUF files of llama and Qwen models, through its wheel.

Figures are the library's own: the time to the first token for prefill, and the time between two tokens of a request
for decode, with concurrent requests in one batch.  It chooses int8 KV and its own precision of activations.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class OpenVinoBaseline:
    """OpenVINO GenAI in the child process. Raises `ImportError` when the library is not installed."""

    NAME = "OpenVINO GenAI"

    def __init__(self, model: str, threads: int, slots: int, slot_tokens: int) -> None:
        """`slots` and `slot_tokens` bound nothing here: the library takes memory as it needs it."""
        import openvino
        import openvino_genai

        self._tensor, self._genai = openvino.Tensor, openvino_genai
        self._rng = np.random.default_rng(0)
        begun = time.perf_counter()
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
        self.about: dict[str, Any] = {
            "version": f"openvino-genai {openvino_genai.__version__}",
            "build": "wheel",
            "cpu": ", ".join(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
            "load_ms": round(1000 * (time.perf_counter() - begun), 1),
        }

    def _run(self, batch: int, n_prompt: int, n_predict: int) -> Any:
        """The library's measurements of `batch` requests together."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n_predict, True, False
        tokens = self._rng.integers(300, 20000, (batch, n_prompt)).astype(np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(tokens), self._tensor(np.ones_like(tokens)))
        return self._pipeline.generate(inputs, config).perf_metrics

    def prefill(self, n: int) -> float:
        """Tokens per second from a prompt to its first output token."""
        return 1000 * n / float(self._run(1, n, 1).get_ttft().mean)

    def decode(self, batch: int, cached: int, n: int) -> float:
        """Tokens per second of `batch` sequences together, `n` tokens each after `cached` ones."""
        # The library's time per output token is that of all requests together: the wall clock says so, too.
        return 1000 / float(self._run(batch, cached, n + 1).get_tpot().mean)
