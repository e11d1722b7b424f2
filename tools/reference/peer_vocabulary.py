"""llama.cpp's tokenizer, out of the wheel `xllamacpp` (`make peers`): token ids to compare with.

Its functions are those of peer_context.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from tools.reference.peer_context import PARAMETERS, Parameters, load_library

_VOCAB_ONLY = 72  # offset of `vocab_only` in it
_FLAGS = bytes([0, 0, 1])  # the defaults of vocab_only, check_tensors and use_extra_bufts


def is_installed() -> bool:
    """Whether the wheel is there."""
    return importlib.util.find_spec("xllamacpp") is not None


class PeerVocabulary:
    """The vocabulary of a GGUF file, loaded by llama.cpp. Raises `RuntimeError` if it refuses the file."""

    def __init__(self, path: Path) -> None:
        self._library = load_library()
        raw = bytearray(ctypes.string_at(ctypes.byref(self._library.llama_model_default_params()), PARAMETERS))
        if raw[_VOCAB_ONLY : _VOCAB_ONLY + 3] != _FLAGS:
            raise RuntimeError("llama_model_params has another layout in this release of xllamacpp")
        raw[_VOCAB_ONLY] = 1
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), Parameters.from_buffer_copy(bytes(raw))
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load the vocabulary of {path}")
        self._vocabulary = self._library.llama_model_get_vocab(self._model)

    def encode(self, text: str, parse_special: bool, add_bos: bool = False) -> list[int]:
        """Return the token ids of a text."""
        data = text.encode()
        ids = (ctypes.c_int32 * (2 * len(data) + 16))()
        n = self._library.llama_tokenize(self._vocabulary, data, len(data), ids, len(ids), add_bos, parse_special)
        if n < 0:
            raise RuntimeError(f"llama.cpp needs room for {-n} tokens, and has room for {len(ids)}")
        return list(ids[:n])

    def close(self) -> None:
        """Free the model."""
        if self._model:
            self._library.llama_model_free(self._model)
            self._model = None
