"""Names of models with a LoRA adapter, MODEL:ADAPTER, and the digest that stands for the files of both."""

from __future__ import annotations

import hashlib
from functools import lru_cache


def base_of(name: str) -> str:
    """The model of MODEL:ADAPTER; `name` itself if it names no adapter."""
    return name.partition(":")[0]


def adapter_of(name: str) -> str:
    """The adapter of MODEL:ADAPTER; "" if `name` names none."""
    return name.partition(":")[2]


def sort_key(name: str) -> tuple[str, str]:
    """Sorts each model before its adapters, and these before other models."""
    return base_of(name), adapter_of(name)


@lru_cache(maxsize=1024)
def adapted_digest(digest: str, adapter_digest: str) -> str:
    """SHA-256 (hex) of the weights of a model with an adapter, from the digests of both."""
    return hashlib.sha256(f"{digest}/{adapter_digest}".encode()).hexdigest()
