"""Hyper-parameters and tensors of a GGUF file for both references. Independent of ingest and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tools.reference.blocks import Matrix, unpack


class Hyper(NamedTuple):
    """Hyper-parameters of a llama graph. Counts, except RoPE's base and scale, `eps` and `pairs`."""

    n_layers: int
    width: int  # of the residual stream
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int  # leading values of a head that RoPE rotates
    eps: np.float32
    rope_base: float
    rope_scale: float
    context_length: int
    pairs: str  # "neighbours": RoPE rotates values (2i, 2i+1) together; "halves": (i, i + n_rot / 2)


def pair_slices(n_rot: int, pairs: str) -> tuple[slice, slice]:
    """Positions in a head of the first and of the second values of the pairs that RoPE rotates."""
    if pairs == "neighbours":
        return slice(0, n_rot, 2), slice(1, n_rot, 2)
    return slice(0, n_rot // 2), slice(n_rot // 2, n_rot)


class Source:
    """A GGUF file of architecture `llama` or `qwen2`. Raises `ValueError` for another one."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {t.name: t for t in reader.tensors}
        arch = self._value("general.architecture")
        if arch not in ("llama", "qwen2"):
            raise ValueError(f"{path}: architecture is {arch!r}, expected 'llama' or 'qwen2'")
        scaling = self._value(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ValueError(f"{path}: {arch}.rope.scaling.type is {scaling!r}, expected 'none' or 'linear'")
        width, n_heads = self._value(f"{arch}.embedding_length"), self._value(f"{arch}.attention.head_count")
        head_dim = self._value(f"{arch}.attention.key_length", width // n_heads)
        self.hyper = Hyper(
            n_layers=self._value(f"{arch}.block_count"),
            width=width,
            n_heads=n_heads,
            n_kv_heads=self._value(f"{arch}.attention.head_count_kv", n_heads),
            head_dim=head_dim,
            n_rot=self._value(f"{arch}.rope.dimension_count", head_dim),
            eps=np.float32(self._value(f"{arch}.attention.layer_norm_rms_epsilon")),
            rope_base=float(self._value(f"{arch}.rope.freq_base", 10000.0)),
            rope_scale=float(self._value(f"{arch}.rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0,
            context_length=self._value(f"{arch}.context_length"),
            pairs="halves" if arch == "qwen2" else "neighbours",
        )

    def _value(self, key: str, default: Any = None) -> Any:
        if key in self._fields:
            return self._fields[key].contents()
        if default is None:
            raise ValueError(f"{key} is missing")
        return default

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def head_name(self) -> str:
        """The tensor of the output head: its own, or the embedding's when the two are tied."""
        return "output.weight" if "output.weight" in self else "token_embd.weight"

    def values(self, name: str) -> np.ndarray:
        """A tensor dequantized: f32, rows first."""
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a matrix dequantized: (len(rows), K) f32."""
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float32)

    def matrix(self, name: str) -> Matrix | np.ndarray:
        """A matrix as its blocks' integers and scales, or (rows, K) f32 for unquantized formats."""
        tensor = self._tensors[name]
        return unpack(tensor.data, tensor.tensor_type)
