"""Adapters in GGUF files, as llama.cpp's converter writes them.

    general.type = "adapter", general.architecture = that of the model, adapter.type = "lora", adapter.lora.alpha
    blk.3.attn_q.weight.lora_a  (rank, columns)        blk.3.attn_q.weight.lora_b  (rows, rank)

The scale is alpha / rank; an alpha of 0 stands for 1.  Rows of q and k are in the order of the model's GGUF file.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-adapter.cpp
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from stages.worker.adapters.adapter import PARAM, Change, Matrix
from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.source import TensorInfo
from stages.worker.kernels.formats import DenseFormat

_A, _B = ".weight.lora_a", ".weight.lora_b"


def read_gguf_adapter(path: Path, architecture: str) -> Iterator[Change]:
    """The changes of a GGUF adapter for a model of that architecture. Raises `ConfigError`, `OSError`."""
    try:
        file = GgufFile(path)
    except GgufError as error:
        raise ConfigError(str(error), PARAM) from None
    _expect(file, "general.type", "adapter")
    _expect(file, "adapter.type", "lora")
    _expect(file, "general.architecture", architecture)
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ConfigError(
            f"{path}: adapter.alora.invocation_tokens is set; activated adapters (aLoRA) are not supported", PARAM
        )
    alpha = file.metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ConfigError(f"{path}: adapter.lora.alpha is {str(alpha)[:40]}, expected a number", PARAM)
    for name, info in file.tensors.items():
        body = name.removesuffix(_A).removesuffix(_B)
        if body == name:
            raise ConfigError(f"{path}: tensor {name!r} is no LoRA matrix (NAME{_A} or NAME{_B})", PARAM)
        other = body + (_B if name.endswith(_A) else _A)
        if other not in file.tensors:
            raise ConfigError(f"{path}: tensor {other!r} is missing, the other one of {name!r}", PARAM)
        if name.endswith(_A):
            a, b = _matrix(file, info), _matrix(file, file.tensors[other])
            yield Change(body, repr(name), a, b, alpha / a.shape[0] if alpha else 1.0)


def _expect(file: GgufFile, key: str, expected: str) -> None:
    found: Any = file.metadata.get(key)
    if found != expected:
        hint = {
            "general.type": "models.path takes models",
            "adapter.type": "only LoRA is supported",
            "general.architecture": "the adapter is of another model",
        }[key]
        raise ConfigError(f"{file.path}: {key} is {str(found)[:60]!r}, expected {expected!r} ({hint})", PARAM)


def _matrix(file: GgufFile, info: TensorInfo) -> Matrix:
    if len(info.shape) != 2 or not isinstance(info.format, DenseFormat):
        raise ConfigError(
            f"{file.path}: tensor {info.name!r} is {info.format.name} {list(info.shape)}, expected a matrix of F32, "
            f"F16 or BF16; convert the adapter with --outtype f16",
            PARAM,
        )
    return Matrix(file.rows(info), info.format)
