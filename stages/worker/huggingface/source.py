"""A Hugging Face directory as ingest reads it: GGUF metadata, and tensors under GGUF names in the order of GGUF rows.

Matrices keep their element type (F32, F16 or BF16); vectors become F32, which is exact.  Rows are made piece by piece:
permuted where the graph rotates neighbours, transposed where the class stores (inputs, outputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.worker.checkpoint.source import TensorInfo, dense_values
from stages.worker.huggingface.config import CheckpointDirectoryError
from stages.worker.huggingface.directory import INDEX, Directory
from stages.worker.huggingface.families import Family, gguf_name, part_of
from stages.worker.huggingface.metadata import family_of, hyper_parameters
from stages.worker.huggingface.safetensors import ELEMENT_BYTES, Stored
from stages.worker.huggingface.vocabulary import read_vocabulary
from stages.worker.kernels.formats import F32, FORMATS


class HuggingFaceSource:
    """Implements `stages.worker.checkpoint.source.Source`."""

    def __init__(self, path: Path, pretokenizer: str = "") -> None:
        """Read configuration, vocabulary and headers. Raises `CheckpointDirectoryError`, `OSError`."""
        self.path = path
        self.directory = Directory(path)
        config = self.directory.config
        _, self._family = family_of(config)
        keys, computed = hyper_parameters(config, self._family)
        self.tensors: dict[str, TensorInfo] = {}
        self._stored: dict[str, Stored] = {}
        self._values: dict[str, np.ndarray] = {}  # of tensors that no file holds
        self._source_names: dict[str, str] = {}
        for name, values in computed.items():
            self.tensors[name] = TensorInfo(name, values.shape, F32, 0, values.nbytes)
            self._values[name] = values
        for name, stored in self.directory.tensors.items():
            self._add(name, stored)
        self._tie()
        self.size = sum(file.size for file in self.directory.files)
        heads = keys.get(f"{self._family.architecture}.attention.head_count", 0)
        self._heads = {
            "attn_q": heads,
            "attn_k": keys.get(f"{self._family.architecture}.attention.head_count_kv", heads),
        }
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointDirectoryError(f"{path}: tensor {self.label('token_embd.weight')} is missing, or no matrix")
        self.metadata: dict[str, Any] = {
            "general.architecture": self._family.architecture,
            "general.name": path.resolve().name,
            **keys,
            **read_vocabulary(path, config, embedding.shape[0], pretokenizer),
        }
        self._check_permutation()

    def _add(self, name: str, stored: Stored) -> None:
        to = gguf_name(self._family, name)
        if not to:
            return
        if stored.dtype not in ELEMENT_BYTES:
            raise CheckpointDirectoryError(
                f"{stored.file.path}: tensor {name!r} is {stored.dtype}, expected {', '.join(ELEMENT_BYTES)}; use an "
                f"unquantized checkpoint"
            )
        if to in self._stored:
            raise CheckpointDirectoryError(
                f"{stored.file.path}: tensors {self._source_names[to]!r} and {name!r} are the same ({to})"
            )
        if not stored.shape or 0 in stored.shape:
            raise CheckpointDirectoryError(f"{stored.file.path}: tensor {name!r} has shape {list(stored.shape)}")
        shape = stored.shape
        if len(shape) == 2 and self._is_transposed(to):
            shape = shape[::-1]
        fmt = FORMATS[stored.dtype] if len(shape) > 1 else F32
        values = stored.nbytes // ELEMENT_BYTES[stored.dtype]
        self.tensors[to] = TensorInfo(to, shape, fmt, 0, values * fmt.source_bytes)
        self._stored[to], self._source_names[to] = stored, name

    def _is_transposed(self, name: str) -> bool:
        return name.startswith("blk.") and part_of(name) in self._family.transposed

    def _tie(self) -> None:
        """A model with one matrix for embedding and head may store it twice; one with two must have both."""
        config = self.directory.config
        if config.flag("tie_word_embeddings", self._family.is_tied):
            self.tensors.pop("output.weight", None)
        elif "output.weight" not in self.tensors and config.has("tie_word_embeddings"):
            raise CheckpointDirectoryError(
                f"{self.path}: tensor 'lm_head.weight' is missing, and {config.path}: tie_word_embeddings is false; "
                f"fetch the checkpoint again, with {INDEX}"
            )

    def _check_permutation(self) -> None:
        for name, info in self.tensors.items():
            heads = self._heads.get(part_of(name), 0) if name.startswith("blk.") else 0
            if heads and part_of(name) in self._family.permuted and info.shape[0] % (2 * heads):
                raise CheckpointDirectoryError(
                    f"{self.path}: tensor {self.label(name)} has shape {list(info.shape)}, expected {heads} heads of "
                    f"an even number of rows"
                )

    # -------------------------------------------------------------- use

    def rows(self, info: TensorInfo) -> TensorRows:
        """A tensor's rows, which are made when they are asked for."""
        if info.name in self._values:
            raw = self._values[info.name].view(np.uint8).reshape(1, -1)
            return TensorRows(raw, None, "F32", False, False)
        stored = self._stored[info.name]
        width = ELEMENT_BYTES[stored.dtype]
        if len(info.shape) == 1:
            raw = stored.data.reshape(-1, width)  # a row for each value, until they are in order
        else:
            raw = stored.data.reshape(stored.shape[0], -1)
        order = None
        part = part_of(info.name)
        if info.name.startswith("blk.") and part in self._family.permuted:
            order = _neighbours(info.shape[0], self._heads[part])
        transposed = len(info.shape) == 2 and self._is_transposed(info.name)
        plus_one = len(info.shape) == 1 and self._family.plus_one and info.name.endswith("norm.weight")
        return TensorRows(raw, order, stored.dtype, transposed, plus_one, is_vector=len(info.shape) == 1)

    def release(self, info: TensorInfo) -> None:
        """As `Source.release`."""
        if info.name in self._stored:
            stored = self._stored[info.name]
            stored.file.release(stored)

    def label(self, name: str) -> str:
        """The file's name of a tensor, and the GGUF name."""
        own = self._source_names.get(name) or _expected_name(self._family, name)
        return f"{own!r} ({name})"

    def identity(self) -> tuple[int, ...]:
        """Of all weight files, and of the small files by their paths."""
        numbers: list[int] = []
        for file in self.directory.files:
            numbers += file.identity()
        for path in self.directory.small_files:
            info = path.stat()
            numbers += (info.st_size, info.st_mtime_ns, info.st_ino)
        return tuple(numbers)


@dataclass(frozen=True)
class TensorRows:
    """Implements `stages.worker.checkpoint.source.Rows`."""

    raw: np.ndarray  # as stored, (rows, bytes) u8
    order: np.ndarray | None  # row i is the stored row order[i]
    dtype: str
    is_transposed: bool
    plus_one: bool
    is_vector: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, bytes of a row)."""
        if self.is_vector:
            return (1, self.raw.shape[0] * 4)
        if self.is_transposed:
            width = ELEMENT_BYTES[self.dtype]
            return (self.raw.shape[1] // width, self.raw.shape[0] * width)
        return self.raw.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        if self.is_vector:
            ordered = self.raw if self.order is None else self.raw[self.order]
            values = dense_values(np.ascontiguousarray(ordered).reshape(-1), self.dtype)
            values = values + np.float32(1) if self.plus_one else values
            return values.view(np.uint8).reshape(1, -1)
        if self.is_transposed:
            elements = self.raw.view("<u4" if self.dtype == "F32" else "<u2")
            return np.ascontiguousarray(elements[:, rows].T).view(np.uint8)
        return self.raw[rows] if self.order is None else self.raw[self.order[rows]]


def _neighbours(rows: int, heads: int) -> np.ndarray:
    """Which stored row each row is, if the two halves of each head are to alternate."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _expected_name(family: Family, name: str) -> str:
    """The name that a class gives a GGUF tensor."""
    body, _, kind = name.rpartition(".")
    if body == "output":
        return f"lm_head.{kind}"
    for own, to in family.top.items():
        if to == body:
            return f"{family.prefix}{own}.{kind}"
    if body.startswith("blk."):
        _, number, part = body.split(".", 2)
        for own, to in family.layer.items():
            if to == part:
                return f"{family.prefix}{family.layers}{number}.{own}.{kind}"
    return name
