"""ik_llama.cpp, a fork of llama.cpp with CPU kernels of its own, through the wheel `ik_llama_cpp_python`.

It is driven as llama.cpp is (native_baseline.py): the same calls, on one context with flash attention and one without.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tools.bench.offline.native_baseline import CHUNK, NativeBaseline


class IkBaseline(NativeBaseline):
    """ik_llama.cpp in the child process. Raises `ImportError` when the library is not installed."""

    NAME = "ik_llama.cpp"

    def _library(self) -> Any:
        from ik_llama_cpp import _ctypes_api

        return _ctypes_api

    def _about(self) -> dict[str, Any]:
        from importlib.metadata import version

        from ik_llama_cpp._lib_loader import load_shared_library

        features = load_shared_library().llama_print_system_info
        features.restype = ctypes.c_char_p
        return {
            "version": f"ik-llama-cpp-python {version('ik-llama-cpp-python')}",
            "build": "wheel",
            "cpu": features().decode().strip(" |"),
        }

    def _context(self, threads: int, slots: int, slot_tokens: int, flash: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = slots * slot_tokens, slots
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = bool(flash)
        return self._lib.llama_init_from_model(self._model, params)

    def decode(self, batch: int, cached: int, n: int) -> float:
        """As of llama.cpp. Several sequences end this version's flash attention at an assertion."""
        contexts = self._contexts if batch == 1 else self._contexts[:1]
        return max(self._decode(context, batch, cached, n) for context in contexts)

    def _clear(self, context: Any) -> None:
        self._lib.llama_kv_cache_clear(context)
