"""llama.cpp through `llama-cpp-python`, compiled for this CPU (`make peers-native`): the fastest baseline.

It is driven by its plain decode call, without server or sampler (the highest logit is taken), on one context with
flash attention and one without; every measurement runs on both and the better figure counts.  The protocol is that of
`tools.bench.offline.baseline`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 512  # tokens of a call, as many as a step of the candidate


def resident_mb() -> float:
    """Memory of this process, in 10^6 bytes, maps included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


class NativeBaseline:
    """llama.cpp in the child process. Raises `ImportError` when the library is not installed."""

    NAME = "llama.cpp"

    def __init__(self, model: str, threads: int, slots: int, slot_tokens: int) -> None:
        self._rng = np.random.default_rng(0)
        self._lib = self._library()
        self._lib.llama_backend_init()
        begun = time.perf_counter()
        self._model = self._lib.llama_model_load_from_file(model.encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{self.NAME} cannot load {model}")
        contexts = [self._context(threads, slots, slot_tokens, flash) for flash in (0, 1)]
        self._contexts = [context for context in contexts if context]
        self._vocab = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._decode_once(self._contexts[0], [1], [0], [0], [0])
        self.about: dict[str, Any] = self._about() | {"load_ms": round(1000 * (time.perf_counter() - begun), 1)}

    def _library(self) -> Any:
        import llama_cpp

        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._keep = quiet  # the library calls it as long as it lives
        llama_cpp.llama_log_set(quiet, None)
        return llama_cpp

    def _about(self) -> dict[str, Any]:
        return {
            "version": f"llama-cpp-python {self._lib.__version__}",
            "build": "compiled for this CPU",
            "cpu": self._lib.llama_print_system_info().decode().strip(" |"),
        }

    def _context(self, threads: int, slots: int, slot_tokens: int, flash: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = slots * slot_tokens, slots, True
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        return self._lib.llama_init_from_model(self._model, params)

    def _decode_once(self, context: Any, tokens: Any, at: Any, slots: Any, sampled: list[int]) -> list[int]:
        """One call of the forward pass; the most likely token after each entry whose index is in `sampled`."""
        lib = self._lib
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = int(token), int(at[i])
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, int(slots[i])
                batch.logits[i] = 0
            for i in sampled:
                batch.logits[i] = 1
            if lib.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            rows = [lib.llama_get_logits_ith(context, i) for i in sampled]
            return [int(np.argmax(np.ctypeslib.as_array(row, (self._vocab,)))) for row in rows]
        finally:
            lib.llama_batch_free(batch)

    def _prompt(self, context: Any, slot: int, n: int) -> int:
        tokens = self._rng.integers(300, min(20000, self._vocab), n)
        token = [0]
        for first in range(0, n, CHUNK):
            part = tokens[first : first + CHUNK]
            last = [len(part) - 1] if first + len(part) == n else []
            token = self._decode_once(context, part, range(first, first + len(part)), [slot] * len(part), last)
        return token[0]

    def _clear(self, context: Any) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)

    def prefill(self, n: int) -> float:
        """Tokens per second from a prompt to its first output token."""
        return max(self._prefill(context, n) for context in self._contexts)

    def _prefill(self, context: Any, n: int) -> float:
        self._clear(context)
        begun = time.perf_counter()
        self._prompt(context, 0, n)
        return n / (time.perf_counter() - begun)

    def depth(self, cached: int, n: int) -> tuple[float, float]:
        """Tokens per second of a chunk of a prompt, and of `n` tokens, behind `cached` positions that are computed."""
        found = [self._depth(context, cached, n) for context in self._contexts]
        return max(chunk for chunk, _ in found), max(decode for _, decode in found)

    def _depth(self, context: Any, cached: int, n: int) -> tuple[float, float]:
        self._clear(context)
        self._prompt(context, 0, cached)
        tokens = self._rng.integers(300, min(20000, self._vocab), CHUNK)
        begun = time.perf_counter()
        token = self._decode_once(context, tokens, range(cached, cached + CHUNK), [0] * CHUNK, [CHUNK - 1])
        chunk_s, begun = time.perf_counter() - begun, time.perf_counter()
        for i in range(n):
            token = self._decode_once(context, token, [cached + CHUNK + i], [0], [0])
        return CHUNK / chunk_s, n / (time.perf_counter() - begun)

    def decode(self, batch: int, cached: int, n: int) -> float:
        """Tokens per second of `batch` sequences together, `n` tokens each after `cached` ones."""
        return max(self._decode(context, batch, cached, n) for context in self._contexts)

    def _decode(self, context: Any, batch: int, cached: int, n: int) -> float:
        self._clear(context)
        tokens = [self._prompt(context, slot, cached) for slot in range(batch)]
        everyone = list(range(batch))
        begun = time.perf_counter()
        for i in range(n):
            tokens = self._decode_once(context, tokens, [cached + i] * batch, everyone, everyone)
        return batch * n / (time.perf_counter() - begun)
