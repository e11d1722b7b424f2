"""llama.cpp's functions of models, vocabularies and contexts, out of the wheel `xllamacpp` (`make peers`).

The wheel's extension module exports the C functions.  Structures of parameters are passed with more bytes than they
have, since a release may append fields; the defaults of those that are set here must be the expected ones.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_bool, c_char, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from typing import Any

PARAMETERS = 512  # bytes: more than a structure of parameters has
_CONTEXT_FIELDS: list[tuple[str, Any]] = [
    ("n_ctx", c_uint32),
    ("n_batch", c_uint32),
    ("n_ubatch", c_uint32),
    ("n_seq_max", c_uint32),
    ("others", c_uint32 * 3),
    ("n_threads", c_int32),
    ("n_threads_batch", c_int32),
    ("ctx_type", c_int32),
    ("kinds", c_int32 * 3),  # of RoPE scaling, pooling and attention
    ("flash_attn_type", c_int32),
    ("rope", c_float * 6),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("on_eval", c_void_p * 2),
    ("type_k", c_int32),
    ("type_v", c_int32),
    ("pointers", c_void_p * 3),
    ("flags", c_bool * 5),  # embeddings, offload_kqv, no_perf, op_offload, swa_full
    ("kv_unified", c_bool),
]
# The first fields, both enumerations around the type of attention, the types of K and V, and the flags.
_DEFAULTS = ((512, 2048, 512, 1, 0, 0, 1), (-1, -1, -1, -1), (1, 1), (False, True, True, True, True, False))
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)(lambda level, text, data: None)


class Parameters(ctypes.Structure):
    """A structure of parameters as bytes."""

    _fields_ = [("raw", c_char * PARAMETERS)]


class ContextParameters(ctypes.Structure):
    """`llama_context_params`: the fields that are used here by their names."""

    _fields_ = [*_CONTEXT_FIELDS, ("more", c_char * 256)]


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", ctypes.POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", ctypes.POINTER(c_int32)),
        ("n_seq_id", ctypes.POINTER(c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(c_int32))),
        ("logits", ctypes.POINTER(c_int8)),
    ]


# By function: the type of its result, and those of its arguments.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
    "llama_model_default_params": (Parameters, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, Parameters]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_n_head": (c_int32, [c_void_p]),
    "llama_model_free": (None, [c_void_p]),
    "llama_tokenize": (
        c_int32,
        [c_void_p, c_char_p, c_int32, ctypes.POINTER(c_int32), c_int32, c_bool, c_bool],
    ),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_context_default_params": (ContextParameters, []),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParameters]),
    "llama_free": (None, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_min": (c_int32, [c_void_p, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
    "llama_state_seq_get_size": (c_size_t, [c_void_p, c_int32]),
    "llama_state_seq_get_data": (c_size_t, [c_void_p, ctypes.POINTER(c_uint8), c_size_t, c_int32]),
    "llama_state_seq_set_data": (c_size_t, [c_void_p, ctypes.POINTER(c_uint8), c_size_t, c_int32]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(c_float), [c_void_p, c_int32]),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """`_FUNCTIONS` with their types; llama.cpp logs nothing. Raises `ImportError` without the wheel."""
    import xllamacpp.xllamacpp as extension

    library = ctypes.CDLL(extension.__file__)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(ctypes.cast(_QUIET, c_void_p), None)
    library.llama_backend_init()
    return library


def check_layout(found: ContextParameters) -> None:
    """Raise `RuntimeError` unless these defaults are the expected ones: fields would be elsewhere."""
    firsts = (found.n_ctx, found.n_batch, found.n_ubatch, found.n_seq_max, *found.others)
    seen = firsts, (*found.kinds, found.flash_attn_type), (found.type_k, found.type_v), (*found.flags, found.kv_unified)
    if seen != _DEFAULTS or not 0 < found.n_threads == found.n_threads_batch < 1024:
        raise RuntimeError(
            f"llama_context_params has the defaults {seen} with {found.n_threads} threads, expected {_DEFAULTS}: it "
            f"has another layout in this release of xllamacpp"
        )
