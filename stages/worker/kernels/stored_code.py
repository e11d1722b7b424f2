"""The kernel cache: the object code of each entry (entries.py), stored by compile_entries.py, loaded by compiled.py.

    NAME-KV.o, NAME-KV.symbol   an object file (pipeline/native/object_file.py)

KV is the type of KV cache for `attend`, and `any` for entries that do not depend on it.  features.py names the
directory by the sources and the CPU.  Knows nothing of numba.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.native import object_file
from pipeline.native.object_code import ObjectCode
from shm.checkpoint import Hyper
from stages.worker.kernels import features
from stages.worker.kernels import parameter_block as pb

# By name: the word of the parameter block that holds the address; -1: called from Python.
# Those that take longest to compile come first, so that the compilers end at about the same time.
ENTRIES = {"steps": -1, "draw": pb.DRAW, "matmul": pb.MATMUL, "attend": pb.ATTEND, "embed": pb.EMBED_ROW, "head": -1}
_OF_ADAPTERS = {
    "shrink": pb.SHRINK,
    "expand": pb.EXPAND,
    "find_adapter": pb.FIND_ADAPTER,
    "list_adapted": pb.LIST_ADAPTED,
}
# Those that only some models need; `fit_k` and `quantize_blocks`, which quantize weights, and
# `pack_units`, which packs them.
EXTRA_ENTRIES = {
    "experts": pb.EXPERTS,
    **_OF_ADAPTERS,
    "fit_k": -1,
    "pack_units": -1,
    "quantize_blocks": -1,
    "score_head": pb.SCORE_HEAD,
}


def extra_entries(hyper: Hyper, has_adapters: bool = False) -> tuple[str, ...]:
    """The names in `EXTRA_ENTRIES` that a model needs."""
    adapters = tuple(_OF_ADAPTERS) if has_adapters else ()
    experts = ("experts",) if hyper.n_experts else ()
    return (*experts, *(("score_head",) if hyper.scores_pairs else ()), *adapters)


def stored_type(name: str, kv_type: str) -> str:
    """What `KV` is for an entry."""
    return kv_type if name == "attend" else "any"


def _file(name: str, kv_type: str) -> str:
    return f"{name}-{stored_type(name, kv_type)}"


def symbol_path(name: str, kv_type: str) -> Path:
    """Exists if the entry is stored."""
    return object_file.symbol_path(features.cache_dir(), _file(name, kv_type))


def is_compiled(kv_type: str, extra: tuple[str, ...] = ()) -> bool:
    """Whether all entries for a type of KV cache are stored, and those of `EXTRA_ENTRIES` named in `extra`."""
    return all(symbol_path(name, kv_type).exists() for name in (*ENTRIES, *extra))


def store(name: str, kv_type: str, code: bytes, symbol: str) -> None:
    """Store an entry. Several processes may do so at once."""
    object_file.store(features.cache_dir(), _file(name, kv_type), code, symbol)


def load(name: str, kv_type: str) -> tuple[ObjectCode, int]:
    """The code of a stored entry, and the entry's address; the caller keeps the code as long as it is called.

    Removes an entry that is damaged. Raises `ObjectCodeError`.
    """
    return object_file.load(features.cache_dir(), _file(name, kv_type))
