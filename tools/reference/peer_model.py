"""llama.cpp as a function of tokens, out of the wheel `xllamacpp` (`make peers`): logits, and greedy text.

Its functions are those of peer_context.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from tools.reference.peer_context import check_layout, load_library


class PeerModel:
    """A model for one sequence of up to `context` tokens. A context manager.

    Raises `RuntimeError` if llama.cpp refuses the file, or has another layout of parameters.
    """

    def __init__(self, path: Path, context: int, threads: int) -> None:
        self._library = load_library()
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        parameters = self._library.llama_context_default_params()
        check_layout(parameters)
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = self._library.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {context} tokens for {path}")
        self._batch = self._library.llama_batch_init(context, 0, 1)

    def _decode(self, tokens: Sequence[int] | np.ndarray, first: int, wants_all: bool) -> np.ndarray:
        """Compute tokens at the positions from `first` on; logits of all or of the last one, (n, vocab) f32."""
        batch, n = self._batch, len(tokens)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), first + i, 1, 0
            batch.logits[i] = wants_all or i == n - 1
        if (code := self._library.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code} for {n} tokens at {first}")
        rows = range(n) if wants_all else (n - 1,)
        pointers = [self._library.llama_get_logits_ith(self._context, i) for i in rows]
        return np.stack([np.ctypeslib.as_array(pointer, (self.vocab_size,)) for pointer in pointers])

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits of every position: (len(tokens), vocab) f32."""
        self._forget()
        return self._decode(tokens, 0, wants_all=True)

    def greedy(self, prompt: Sequence[int], n: int, ends: Sequence[int]) -> list[int]:
        """Up to `n` tokens behind a prompt, each the likeliest; without the one of `ends` that ended it."""
        self._forget()
        found: list[int] = []
        row = self._decode(prompt, 0, wants_all=False)[0]
        while len(found) < n:
            token = int(row.argmax())
            if token in ends:
                break
            found.append(token)
            if len(found) < n:
                row = self._decode([token], len(prompt) + len(found) - 1, wants_all=False)[0]
        return found

    def _forget(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def close(self) -> None:
        """Free context and model."""
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
