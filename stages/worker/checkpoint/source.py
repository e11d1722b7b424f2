"""What ingest reads a model from: a GGUF file, a Hugging Face directory, or one of them with other weight types.

All have metadata by GGUF keys and tensors by GGUF names.  Rows of a tensor are made when they are asked for, so that
no tensor need be in memory as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from stages.worker.kernels.formats import Format

# Key of metadata of a directory that older releases read otherwise: its checkpoint is another one (`revision_of`).
REVISED = "starling.revised"


class TensorInfo(NamedTuple):
    """`shape` is in NumPy's order (rows first); `start` is an offset from the beginning of the file, if it has one."""

    name: str
    shape: tuple[int, ...]
    format: Format
    start: int
    nbytes: int


class Rows(Protocol):
    """A tensor's rows as the bytes of its format: `rows[a:b]` is (b - a, bytes of a row) u8."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


class Source(Protocol):
    """A model's metadata and tensors. `path` names it in messages."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    size: int  # bytes of its files

    def rows(self, info: TensorInfo) -> Rows:
        """A tensor's rows."""

    def release(self, info: TensorInfo) -> None:
        """Drop the tensor's pages from this process's memory."""

    def label(self, name: str) -> str:
        """How messages name a tensor."""

    def identity(self) -> tuple[int, ...]:
        """What changes when the opened files' bytes may have changed."""


def vector(source: Source, info: TensorInfo) -> np.ndarray:
    """The values of a tensor of an unquantized format, flat f32."""
    return dense_values(np.ascontiguousarray(source.rows(info)[:]).reshape(-1), info.format.name)


def dense_values(raw: np.ndarray, format_name: str) -> np.ndarray:
    """Bytes of F32, F16 or BF16 values as f32; the last axis is of bytes."""
    if format_name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f4" if format_name == "F32" else "<f2").astype(np.float32)
