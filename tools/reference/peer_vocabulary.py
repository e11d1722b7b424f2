"""llama.cpp's tokenizer, out of the wheel `xllamacpp` (`make peers`): token ids to compare with.

The wheel's extension module exports the C functions; the structure of load parameters is passed as bytes.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

_PARAMETERS = 512  # bytes: more than `llama_model_params` has
_VOCAB_ONLY = 72  # offset of `vocab_only` in it
_FLAGS = bytes([0, 0, 1])  # the defaults of vocab_only, check_tensors and use_extra_bufts


class _Parameters(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_char * _PARAMETERS)]


_library: ctypes.CDLL | None = None


def is_installed() -> bool:
    """Whether the wheel is there."""
    return importlib.util.find_spec("xllamacpp") is not None


def _load_library() -> ctypes.CDLL:
    global _library
    if _library is not None:
        return _library
    import xllamacpp.xllamacpp as extension

    library = ctypes.CDLL(extension.__file__)
    library.llama_model_default_params.restype = _Parameters
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_model_free.argtypes = [ctypes.c_void_p]
    library.llama_model_free.restype = None
    library.llama_tokenize.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int32,
        ctypes.c_bool,
        ctypes.c_bool,
    ]
    library.llama_log_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.llama_log_set.restype = None
    library.llama_log_set(ctypes.cast(_QUIET, ctypes.c_void_p), None)
    library.llama_backend_init()
    _library = library
    return library


_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class PeerVocabulary:
    """The vocabulary of a GGUF file, loaded by llama.cpp. Raises `RuntimeError` if it refuses the file."""

    def __init__(self, path: Path) -> None:
        self._library = _load_library()
        raw = bytearray(ctypes.string_at(ctypes.byref(self._library.llama_model_default_params()), _PARAMETERS))
        if raw[_VOCAB_ONLY : _VOCAB_ONLY + 3] != _FLAGS:
            raise RuntimeError("llama_model_params has another layout in this release of xllamacpp")
        raw[_VOCAB_ONLY] = 1
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), _Parameters.from_buffer_copy(bytes(raw))
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
