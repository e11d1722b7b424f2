"""llama.cpp through `llama-cpp-python`, compiled for this CPU (`make peers-native`): the fastest baseline.

It is driven by its plain decode call, without server or sampler (the highest logit is taken), on one context with
flash attention and one without; every measurement runs on both and the better figure counts.  The protocol is that of
`tools.bench.offline.baseline`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.offline.filled_cache import CacheFiller

CHUNK = 512  # tokens of a call, as many as a step of the candidate
FLASH = (0, 1)  # without flash attention, and with it
CACHE_TYPES = {"f32": 0, "f16": 1, "int8": 8}  # ggml's numbers of types of K and V that Starling has, too (8: Q8_0)
SCORES_BYTES = 2 << 30  # of a graph without flash attention: all scores of the tokens that it computes at a time


def resident_mb() -> float:
    """Memory of this process, in 10^6 bytes, maps included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


class NativeBaseline:
    """llama.cpp in the child process. Raises `ImportError` when the library is not installed."""

    NAME = "llama.cpp"

    def __init__(
        self,
        model: str,
        threads: int,
        slots: int,
        slot_tokens: int,
        flash: Sequence[int] = FLASH,
        kv_type: str = "f16",
    ) -> None:
        """`flash`: the contexts, of FLASH; the better one counts. `kv_type`: of CACHE_TYPES, int8 with flash alone."""
        self._cache_type = CACHE_TYPES[kv_type]
        self._rng = np.random.default_rng(0)
        self._lib = self._library()
        self._lib.llama_backend_init()
        begun = time.perf_counter()
        self._model = self._lib.llama_model_load_from_file(model.encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{self.NAME} cannot load {model}")
        contexts = [self._context(threads, slots, slot_tokens, kind) for kind in flash]
        self._contexts = [context for context in contexts if context]
        if not self._contexts:
            raise RuntimeError(f"{self.NAME} cannot make a context of {slots * slot_tokens:,} tokens")
        self._depths: dict[Any, int] = {}  # by context: positions of a cache that is filled
        self.kv_mb = 0.0  # of the cache that `depth` has filled last, 10^6 bytes
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
        # One more sequence, through which cells are restored (filled_cache.py).
        params.n_ctx, params.n_seq_max, params.kv_unified = slots * slot_tokens, slots + 1, True
        params.n_batch = params.n_ubatch = CHUNK
        token_bytes = 4 * params.n_ctx * self._lib.llama_model_n_head(self._model)
        while not flash and params.n_ubatch > 1 and params.n_ubatch * token_bytes > SCORES_BYTES:
            params.n_ubatch //= 2
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        params.type_k = params.type_v = self._cache_type
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

    def depth(self, cached: int, n: int, is_computed: bool = False) -> tuple[float, float]:
        """Tokens per second of a chunk of a prompt, and of `n` tokens, each behind `cached` positions.

        All of these are computed, or one block of them (filled_cache.py).
        """
        found = [self._depth(context, cached, n, is_computed) for context in self._contexts]
        return max(chunk for chunk, _ in found), max(decode for _, decode in found)

    def fill(self, cached: int) -> None:
        """Fill the caches for `depth`, so that it measures at once."""
        for context in self._contexts:
            self._fill(context, cached)

    def _fill(self, context: Any, cached: int) -> None:
        if self._depths.get(context) != cached:
            self._clear(context)
            self._prompt(context, 0, min(cached, CHUNK))
            filler = CacheFiller(self._lib, context)
            if cached > CHUNK:
                filler.fill(filler.state(0, CHUNK), CHUNK, cached)
            self._decode_once(context, [1], [cached], [0], [0])
            filler.cut(cached)
        self._depths[context] = cached
        self.kv_mb = self._lib.llama_state_seq_get_size(context, 0) / 1e6

    def _depth(self, context: Any, cached: int, n: int, is_computed: bool) -> tuple[float, float]:
        if is_computed:
            self._depths.pop(context, None)
            self._clear(context)
            self._prompt(context, 0, cached)
        else:
            self._fill(context, cached)
        filler = CacheFiller(self._lib, context)
        tokens = self._rng.integers(300, min(20000, self._vocab), CHUNK)
        begun = time.perf_counter()
        token = self._decode_once(context, tokens, range(cached, cached + CHUNK), [0] * CHUNK, [CHUNK - 1])
        chunk_s = time.perf_counter() - begun
        filler.cut(cached)
        begun = time.perf_counter()
        for i in range(n):
            token = self._decode_once(context, token, [cached + i], [0], [0])
        decode_s = time.perf_counter() - begun
        filler.cut(cached)
        return CHUNK / chunk_s, n / decode_s

    def is_restored(self, n: int) -> bool:
        """Whether `n` computed positions, restored in blocks, give the same logits for the next token, bit for bit."""
        return all(self._is_restored(context, n) for context in self._contexts)

    def _is_restored(self, context: Any, n: int) -> bool:
        filler = CacheFiller(self._lib, context)
        self._clear(context)
        token = self._prompt(context, 0, n)
        blocks = [(first, filler.state(first, min(CHUNK, n - first))) for first in range(0, n, CHUNK)]
        computed = self._logits(context, token, n)
        self._clear(context)
        for first, state in blocks:
            state.move(0)
            filler.append(state, first)
        filler.cut(n)
        restored = self._logits(context, token, n)
        # The first block in the place of each other one is another text.
        self._clear(context)
        filler.append(blocks[0][1], 0)
        filler.fill(blocks[0][1], CHUNK, n)
        repeated = self._logits(context, token, n)
        self._clear(context)
        self._depths.pop(context, None)
        return np.array_equal(restored, computed) and not np.array_equal(repeated, computed)

    def _logits(self, context: Any, token: int, at: int) -> np.ndarray:
        self._decode_once(context, [token], [at], [0], [0])
        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, 0), (self._vocab,)).copy()

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
