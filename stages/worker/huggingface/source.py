"""A Hugging Face directory as ingest reads it: GGUF metadata, and tensors under GGUF names in the order of GGUF rows.

Matrices keep their element type (F32, F16 or BF16); vectors become F32, which is exact.  Rows are made piece by piece:
permuted where the graph rotates neighbours, transposed where the class stores (inputs, outputs), gathered where each
expert has a tensor of its own.  Routers of experts and the embedding of token types become F32, as in GGUF files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.models.model_directory import INDEX
from stages.worker.checkpoint.source import Rows, TensorInfo, dense_values
from stages.worker.huggingface.biases import check_biases
from stages.worker.huggingface.config import CheckpointDirectoryError
from stages.worker.huggingface.directory import Directory
from stages.worker.huggingface.families import Family, Place, neighbours, part_of, places
from stages.worker.huggingface.metadata import family_of, hyper_parameters, position_offset
from stages.worker.huggingface.pooling import read_pooling
from stages.worker.huggingface.safetensors import ELEMENT_BYTES, Stored
from stages.worker.huggingface.vocabulary import read_vocabulary
from stages.worker.kernels.formats import F32, FORMATS

_SHARED_GATE = "ffn_gate_inp_shexp"
_POSITIONS = "position_embd.weight"
_WIDE = ("ffn_gate_inp", "token_types")  # matrices that become F32


class _Origin(NamedTuple):
    """A stored tensor that a GGUF tensor is made of."""

    name: str
    stored: Stored
    half: int  # of each of its parts' rows, 0 or 1; -1: all rows


class HuggingFaceSource:
    """Implements `stages.worker.checkpoint.source.Source`."""

    def __init__(self, path: Path, pretokenizer: str = "") -> None:
        """Read configuration, vocabulary and headers. Raises `CheckpointDirectoryError`, `OSError`."""
        self.path = path
        self.directory = Directory(path)
        config = self.directory.config
        _, self._family = family_of(config)
        keys, computed = hyper_parameters(config, self._family)
        self._n_skipped = position_offset(config, self._family)
        self.tensors: dict[str, TensorInfo] = {}
        self._stored: dict[str, list[_Origin]] = {}  # several: of the experts, in order
        self._values: dict[str, np.ndarray] = {}  # of tensors that no file holds
        for name, values in computed.items():
            self.tensors[name] = TensorInfo(name, values.shape, F32, 0, values.nbytes)
            self._values[name] = values
        experts: dict[str, dict[int, _Origin]] = {}
        for name, stored in self.directory.tensors.items():
            for place in places(self._family, name):
                self._check(name, stored)
                origin = _Origin(name, stored, place.half)
                if place.expert < 0:
                    self._add(place, origin)
                elif place.expert in experts.setdefault(place.name, {}):
                    raise CheckpointDirectoryError(
                        f"{stored.file.path}: tensor {name[:120]!r} is of an expert that has one"
                    )
                else:
                    experts[place.name][place.expert] = origin
        for to, found in experts.items():
            self._add_experts(to, found)
        self._tie()
        check_biases(config, self._family, self.tensors)
        self.size = sum(file.size for file in self.directory.files)
        heads = keys.get(f"{self._family.architecture}.attention.head_count", 0)
        self._heads = {
            "attn_q": heads,
            "attn_k": keys.get(f"{self._family.architecture}.attention.head_count_kv", heads),
        }
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointDirectoryError(f"{path}: tensor {self.label('token_embd.weight')} is missing, or no matrix")
        if config.has("vocab_size") and config.integer("vocab_size") != embedding.shape[0]:
            raise config.refuse("vocab_size", f"{embedding.shape[0]}, the rows of {self.label('token_embd.weight')}")
        self.metadata: dict[str, Any] = {
            "general.architecture": self._family.architecture,
            "general.name": path.resolve().name,
            **keys,
            **read_pooling(path, self._family.architecture),
            **read_vocabulary(path, config, embedding.shape[0], pretokenizer),
        }
        self._check_permutation()

    def _check(self, name: str, stored: Stored) -> None:
        if stored.dtype not in ELEMENT_BYTES:
            raise CheckpointDirectoryError(
                f"{stored.file.path}: tensor {name!r} is {stored.dtype}, expected {', '.join(ELEMENT_BYTES)}; use an "
                f"unquantized checkpoint"
            )
        if not stored.shape or 0 in stored.shape:
            raise CheckpointDirectoryError(
                f"{stored.file.path}: tensor {name!r} has shape {list(stored.shape)}, expected a vector or a matrix "
                f"with values; fetch the file again"
            )

    def _add(self, place: Place, origin: _Origin) -> None:
        to, (name, stored, half) = place.name, origin
        if to in self._stored:
            raise CheckpointDirectoryError(
                f"{stored.file.path}: tensors {self._stored[to][0].name!r} and {name!r} are the same ({to})"
            )
        shape = stored.shape
        if len(shape) == 2 and self._is_transposed(to):
            shape = shape[::-1]
        if half >= 0:
            if len(shape) < 2 or shape[-2] % 2:
                raise CheckpointDirectoryError(
                    f"{stored.file.path}: tensor {name!r} has shape {list(shape)}, expected an even number of rows"
                )
            shape = (*shape[:-2], shape[-2] // 2, shape[-1])
        if part_of(to) == _SHARED_GATE and shape[0] == 1:
            shape = shape[1:]
        if to == _POSITIONS and self._n_skipped:
            if len(shape) != 2 or not 0 < self._n_skipped < shape[0]:
                raise CheckpointDirectoryError(
                    f"{stored.file.path}: tensor {name!r} has shape {list(shape)}, expected more than "
                    f"{self._n_skipped} rows (positions up to pad_token_id are not used)"
                )
            shape = (shape[0] - self._n_skipped, shape[1])
        self._place(to, shape, [origin])

    def _add_experts(self, to: str, found: dict[int, _Origin]) -> None:
        """One tensor of those of all experts."""
        first = next(iter(found.values()))
        for _, (name, stored, _) in sorted(found.items()):
            if (stored.shape, stored.dtype) != (first.stored.shape, first.stored.dtype) or len(stored.shape) != 2:
                raise CheckpointDirectoryError(
                    f"{stored.file.path}: tensor {name!r} is {stored.dtype} {list(stored.shape)}, expected that of "
                    f"{first.name!r}, {first.stored.dtype} {list(first.stored.shape)}, a matrix"
                )
        missing = next((i for i in range(len(found)) if i not in found), None)
        if missing is not None:
            raise CheckpointDirectoryError(
                f"{self.path}: {len(found)} tensors such as {first.name!r} are there, and that of expert {missing} is "
                f"missing; fetch the checkpoint again, with {INDEX}"
            )
        self._place(to, (len(found), *first.stored.shape), [found[i] for i in range(len(found))])

    def _place(self, to: str, shape: tuple[int, ...], origins: list[_Origin]) -> None:
        dtype = origins[0].stored.dtype
        fmt = FORMATS[dtype] if len(shape) > 1 and part_of(to) not in _WIDE else F32
        self.tensors[to] = TensorInfo(to, shape, fmt, 0, prod(shape) * fmt.source_bytes)
        self._stored[to] = origins

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

    def rows(self, info: TensorInfo) -> Rows:
        """A tensor's rows, which are made when they are asked for."""
        if info.name in self._values:
            raw = self._values[info.name].view(np.uint8).reshape(1, -1)
            return TensorRows(raw, None, "F32", False, False)
        origins = self._stored[info.name]
        parts = [self._rows_of(info, origin) for origin in origins]
        return parts[0] if len(parts) == 1 else StackedRows(parts)

    def _rows_of(self, info: TensorInfo, origin: _Origin) -> TensorRows:
        stored = origin.stored
        width = ELEMENT_BYTES[stored.dtype]
        is_vector = len(info.shape) == 1
        # A vector has a row for each value, until they are in order.
        raw = stored.data.reshape(-1, width if is_vector else stored.shape[-1] * width)
        order = None
        part = part_of(info.name)
        if info.name.startswith("blk.") and part in self._family.permuted:
            order = neighbours(info.shape[0], self._heads[part])
        if origin.half >= 0:
            order = np.arange(len(raw)).reshape(-1, 2, info.shape[-2])[:, origin.half].reshape(-1)
        transposed = len(info.shape) == 2 and self._is_transposed(info.name)
        plus_one = is_vector and self._family.plus_one and info.name.endswith("norm.weight")
        if info.name == _POSITIONS and self._n_skipped:
            order = np.arange(self._n_skipped, len(raw))
        is_wide = part in _WIDE and not is_vector
        return TensorRows(raw, order, stored.dtype, transposed, plus_one, is_vector, is_wide)

    def release(self, info: TensorInfo) -> None:
        """As `Source.release`."""
        for origin in self._stored.get(info.name, []):
            origin.stored.file.release(origin.stored)

    def label(self, name: str) -> str:
        """The file's name of a tensor, and the GGUF name."""
        origins = self._stored.get(name)
        own = origins[0].name if origins else _expected_name(self._family, name)
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
    is_wide: bool = False  # a matrix that becomes F32

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, bytes of a row)."""
        if self.is_vector:
            return (1, self.raw.shape[0] * 4)
        if self.is_wide:
            return (self.raw.shape[0], self.raw.shape[1] // ELEMENT_BYTES[self.dtype] * 4)
        if self.is_transposed:
            width = ELEMENT_BYTES[self.dtype]
            return (self.raw.shape[1] // width, self.raw.shape[0] * width)
        return self.raw.shape if self.order is None else (len(self.order), self.raw.shape[1])

    def __getitem__(self, rows: slice) -> np.ndarray:
        if self.is_vector:
            ordered = self.raw if self.order is None else self.raw[self.order]
            values = dense_values(np.ascontiguousarray(ordered).reshape(-1), self.dtype)
            values = values + np.float32(1) if self.plus_one else values
            return values.view(np.uint8).reshape(1, -1)
        if self.is_transposed:
            elements = self.raw.view("<u4" if self.dtype == "F32" else "<u2")
            return np.ascontiguousarray(elements[:, rows].T).view(np.uint8)
        if self.is_wide:
            return dense_values(np.ascontiguousarray(self.raw[rows]), self.dtype).view(np.uint8)
        return self.raw[rows] if self.order is None else self.raw[self.order[rows]]


class StackedRows:
    """Implements `stages.worker.checkpoint.source.Rows`: tensors of equal shapes, one below the other."""

    def __init__(self, parts: Sequence[TensorRows]) -> None:
        self._parts = parts
        self._each, self._row_bytes = parts[0].shape

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, bytes of a row)."""
        return (len(self._parts) * self._each, self._row_bytes)

    def __getitem__(self, rows: slice) -> np.ndarray:
        begin, end, _ = rows.indices(self.shape[0])
        found = []
        for number in range(begin // self._each, -(-end // self._each)):
            first = number * self._each
            found.append(self._parts[number][max(begin - first, 0) : min(end - first, self._each)])
        return np.concatenate(found) if len(found) != 1 else found[0]


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
        names = [*family.layer.items(), *((f"{family.experts_in}0.{own}", to) for own, to in family.experts.items())]
        names += [(own, to) for own, halves in family.halves.items() for to in halves]
        for own, to in names:
            if to == part:
                return f"{family.prefix}{family.layers}{number}.{own}.{kind}"
    return name
