"""The kernel cache: the object code of each entry (entries.py), stored by compile_entries.py, loaded by compiled.py.

    NAME-KV.o        an ELF relocatable object (object_code.py)
    NAME-KV.symbol   the name of the entry in it, and the object's SHA-256; written last: without it nothing is stored

KV is the type of KV cache for `attend`, and `any` for entries that do not depend on it.  features.py names the
directory by the sources and the CPU.  Knows nothing of numba.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shm.checkpoint import Hyper
from stages.worker.kernels import features
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.object_code import ObjectCode, ObjectCodeError

# By name: the word of the parameter block that holds the address; -1: called from Python.
# Those that take longest to compile come first.
ENTRIES = {"steps": -1, "draw": pb.DRAW, "attend": pb.ATTEND, "matmul": pb.MATMUL, "embed": pb.EMBED_ROW, "head": -1}
_OF_ADAPTERS = {
    "shrink": pb.SHRINK,
    "expand": pb.EXPAND,
    "find_adapter": pb.FIND_ADAPTER,
    "list_adapted": pb.LIST_ADAPTED,
}
# Those that only some models need, and `fit_k`, which quantizes weights.
EXTRA_ENTRIES = {"experts": pb.EXPERTS, **_OF_ADAPTERS, "fit_k": -1, "score_head": pb.SCORE_HEAD}


def extra_entries(hyper: Hyper, has_adapters: bool = False) -> tuple[str, ...]:
    """The names in `EXTRA_ENTRIES` that a model needs."""
    adapters = tuple(_OF_ADAPTERS) if has_adapters else ()
    experts = ("experts",) if hyper.n_experts else ()
    return (*experts, *(("score_head",) if hyper.scores_pairs else ()), *adapters)


def stored_type(name: str, kv_type: str) -> str:
    """What `KV` is for an entry."""
    return kv_type if name == "attend" else "any"


def _path(name: str, kv_type: str, suffix: str) -> Path:
    return features.cache_dir() / f"{name}-{stored_type(name, kv_type)}.{suffix}"


def symbol_path(name: str, kv_type: str) -> Path:
    """Exists if the entry is stored."""
    return _path(name, kv_type, "symbol")


def is_compiled(kv_type: str, extra: tuple[str, ...] = ()) -> bool:
    """Whether all entries for a type of KV cache are stored, and those of `EXTRA_ENTRIES` named in `extra`."""
    return all(symbol_path(name, kv_type).exists() for name in (*ENTRIES, *extra))


def store(name: str, kv_type: str, code: bytes, symbol: str) -> None:
    """Store an entry. Several processes may do so at once."""
    described = f"{symbol} {hashlib.sha256(code).hexdigest()}"
    for suffix, data in (("o", code), ("symbol", described.encode())):
        path = _path(name, kv_type, suffix)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)


def load(name: str, kv_type: str) -> tuple[ObjectCode, int]:
    """The code of a stored entry, and the entry's address; the caller keeps the code as long as it is called.

    Removes an entry that is damaged. Raises `ObjectCodeError`.
    """
    path = symbol_path(name, kv_type)
    try:
        symbol, digest = path.read_text().split()
        raw = _path(name, kv_type, "o").read_bytes()
        if hashlib.sha256(raw).hexdigest() != digest:
            raise ObjectCodeError("its bytes are not those that were stored")
        code = ObjectCode(raw)
        return code, code.address(symbol)
    except (OSError, ValueError, ObjectCodeError) as error:
        path.unlink(missing_ok=True)
        raise ObjectCodeError(f"kernel {name!r} in {path.parent} cannot be loaded: {error}") from None
