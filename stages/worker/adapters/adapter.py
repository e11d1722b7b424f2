"""An adapter as a file gives it: pairs of small matrices, compared with the matrices of the model that they change.

A file names tensors as GGUF files do (`blk.3.attn_q`).  `pairs_of` takes a fused one apart (`attn_qkv`, and `ffn_up`
with the gate's rows first), as ingest does with the model's own matrices, and checks every shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import ConfigError
from shm.checkpoint import Index
from stages.worker.checkpoint.source import dense_values
from stages.worker.kernels.adapter_table import DOWN, GATE, TARGETS, UP
from stages.worker.kernels.formats import DenseFormat

PARAM = "models.adapters"
_FUSED = {"attn_qkv": TARGETS[:3]}
_NAME = re.compile(r"blk\.([0-9]{1,6})\.([a-z_]+)")


class Matrix(NamedTuple):
    """Rows of an unquantized matrix: (rows, bytes of a row) u8."""

    rows: np.ndarray
    format: DenseFormat

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows.shape[0], self.rows.shape[1] // self.format.source_bytes

    @property
    def values(self) -> np.ndarray:
        """(rows, columns) f32."""
        return dense_values(np.ascontiguousarray(self.rows), self.format.name).reshape(self.shape)


class Change(NamedTuple):
    """What a file has for one tensor of the model: W + scale * B A. `name` without `.weight`."""

    name: str
    label: str  # in messages
    a: Matrix  # (rank, columns)
    b: Matrix  # (rows, rank)
    scale: float


class Pair(NamedTuple):
    """A change of one matrix of the graph. `target`: its number in `TARGETS`."""

    layer: int
    target: int
    scale: float
    a: Matrix
    b: Matrix

    @property
    def rank(self) -> int:
        """Rows of A, columns of B."""
        return self.a.shape[0]


def pairs_of(path: Path, changes: Iterable[Change], base: Index, max_rank: int) -> list[Pair]:
    """The changes as pairs, in the order of use. Raises `ConfigError`, which names tensor, value, bound and remedy."""
    pairs = [pair for change in changes for pair in _pairs(path, change, base, max_rank)]
    if not pairs:
        raise ConfigError(f"{path} changes no matrix of the model: it has no pair of LoRA matrices", PARAM)
    return sorted(pairs, key=lambda pair: (pair.layer, pair.target))


def _pairs(path: Path, change: Change, base: Index, max_rank: int) -> Iterator[Pair]:
    what = f"{path}: tensor {change.label}"
    found = _NAME.fullmatch(change.name)
    layer, name = (int(found[1]), found[2]) if found else (-1, change.name)
    if name not in TARGETS and name not in _FUSED:
        raise ConfigError(
            f"{what} changes {change.name!r}; adapters may change {', '.join((*TARGETS, *_FUSED))} of a layer: train "
            f"one with other target modules",
            PARAM,
        )
    if not 0 <= layer < base.hyper.n_layers:
        raise ConfigError(f"{what} is of layer {layer}, and the model has {base.hyper.n_layers}: {_OTHER}", PARAM)
    (rank, columns), (rows, b_rank) = change.a.shape, change.b.shape
    if rank != b_rank:
        raise ConfigError(f"{what}: A has {rank} rows and B {b_rank} columns, which must be the same", PARAM)
    if not 1 <= rank <= max_rank:
        raise ConfigError(
            f"{what}: rank is {rank}, expected 1 to {max_rank} (models.max_adapter_rank): raise that, or use an "
            f"adapter of a smaller rank",
            PARAM,
        )
    for which, matrix in (("A", change.a), ("B", change.b)):
        if not np.isfinite(matrix.values).all():
            raise ConfigError(f"{what}: {which} has values that are not finite; train or convert it again", PARAM)
    if not abs(change.scale) <= float(np.finfo(np.float32).max):
        raise ConfigError(f"{what}: the scale is {change.scale}, which is no f32 number", PARAM)
    targets: tuple[str, ...] = _FUSED.get(name, (name,))
    shapes = {one: _shape(base, f"blk.{layer}.{one}.weight") for one in TARGETS}
    if name == TARGETS[UP] and (gate := shapes[TARGETS[GATE]]) and (up := shapes[name]) and rows == gate[0] + up[0]:
        targets = (TARGETS[GATE], TARGETS[UP])
    parts = [shapes[one] for one in targets]
    sizes = [part for part in parts if part]
    if len(sizes) < len(parts):
        raise ConfigError(f"{what} changes {change.name!r}, which the model does not have: {_OTHER}", PARAM)
    if (rows, columns) != (total := (sum(part[0] for part in sizes), sizes[0][1])):
        raise ConfigError(
            f"{what} changes a matrix of {rows} rows and {columns} columns, and the model's {change.name!r} has "
            f"{total[0]} and {total[1]}: {_OTHER}",
            PARAM,
        )
    first = 0
    for one, size in zip(targets, sizes, strict=True):
        b = change.b._replace(rows=change.b.rows[first : first + size[0]])
        yield Pair(layer, TARGETS.index(one), change.scale, change.a, b)
        first += size[0]


_OTHER = "the adapter is of another model; use one that was trained for this one"


def _shape(base: Index, name: str) -> tuple[int, int] | None:
    """Rows and columns of a matrix of the model; None when it has none of this name."""
    if name.split(".")[2] in TARGETS[GATE : DOWN + 1] and base.hyper.n_experts:
        return None
    return next(((t.rows, t.columns) for t in base.tensors if t.name == name), None)
