"""A source with other weight types: which type each tensor gets, and its rows in it.

    --quant     matrices        output head (or the embedding, if the two are tied)
    f16         F16             F16
    q8_0        Q8_0            Q8_0
    q4_0        Q4_0            Q8_0
    q4_1        Q4_1            Q8_0
    q4_k_m      Q4_K            Q6_K

With q4_k_m, ffn_down and attn_v (or the fused attn_qkv) of half the layers are Q6_K too: of the first and the last
eighth, and of every third one in between.

Vectors stay F32; embeddings of positions and routers of experts keep their type.  A matrix whose rows are no multiple
of 256 values becomes Q5_0 instead of Q4_K, and Q8_0 instead of Q6_K.  Tensors must be F32, F16 or BF16: quantizing
twice would add the errors of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError
from stages.worker.checkpoint.quantize import NotFinite
from stages.worker.checkpoint.quantize_compiled import SIMPLE, Quantizer, quantize_rows
from stages.worker.checkpoint.quantize_k import PLAIN, Fits
from stages.worker.checkpoint.source import Rows, Source, TensorInfo
from stages.worker.kernels.formats import FORMATS, Format

_QUANTIZED_BYTES = 1 << 17  # at a time: as f32 they fit into a core's cache
_FINER = ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight", "ffn_down_exps.weight")
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no multiple of 256 values
_HEAD = ("output.weight", "token_embd.weight")


class Mix(NamedTuple):
    """Weight types of a `--quant`."""

    matrices: str
    head: str
    finer: str = ""  # of `_FINER` in half the layers


QUANTS = {
    "f16": Mix("F16", "F16"),
    "q8_0": Mix("Q8_0", "Q8_0"),
    "q4_0": Mix("Q4_0", "Q8_0"),
    "q4_1": Mix("Q4_1", "Q8_0"),
    "q4_k_m": Mix("Q4_K", "Q6_K", "Q6_K"),
}


class Requantized:
    """Implements `Source`: another source, its matrices in the types of a `--quant`."""

    fits: Fits = PLAIN  # of K-quants
    quantizer: Quantizer = staticmethod(quantize_rows)

    def __init__(self, source: Source, quant: str) -> None:
        """Raises `ConfigError` for a tensor that is quantized already."""
        self.source, self._mix = source, QUANTS[quant]
        self.path: Path = source.path
        self.metadata: dict[str, Any] = source.metadata
        self.size = source.size
        n_layers = source.metadata.get(f"{source.metadata.get('general.architecture')}.block_count")
        self._n_layers = n_layers if isinstance(n_layers, int) else 0
        self._head = next((name for name in _HEAD if name in source.tensors), "")
        self.tensors = {name: self._converted(info) for name, info in source.tensors.items()}

    def _converted(self, info: TensorInfo) -> TensorInfo:
        if (
            len(info.shape) < 2
            or info.name.startswith(("position_embd", "token_types", "cls.output"))
            or ".ffn_gate_inp" in info.name
        ):
            return info
        if not info.format.dense:
            raise ConfigError(
                f"{self.path}: tensor {self.label(info.name)} is {info.format.name}, expected F32, F16 or BF16 for "
                f"--quant; leave --quant out, or take the unquantized file",
                "quant",
            )
        fmt = FORMATS[self._type_of(info.name)]
        if info.shape[-1] % fmt.unit:
            fmt = FORMATS[_NARROW.get(fmt.name, "F16")]
        if info.shape[-1] % fmt.unit:
            fmt = FORMATS["F16"]
        nbytes = int(np.prod(info.shape, dtype=np.int64)) // fmt.unit * fmt.source_bytes
        return info._replace(format=fmt, nbytes=nbytes)

    def _type_of(self, name: str) -> str:
        if name == self._head:
            return self._mix.head
        _, _, rest = name.partition("blk.")
        layer, _, part = rest.partition(".")
        if self._mix.finer and part in _FINER and layer.isdecimal() and _is_finer(int(layer), self._n_layers):
            return self._mix.finer
        return self._mix.matrices

    @property
    def k_quantized_bytes(self) -> int:
        """Bytes in the source of the matrices that become K-quants."""
        return self._bytes_of("Q4_K", "Q6_K")

    @property
    def simply_quantized_bytes(self) -> int:
        """Bytes in the source of the matrices that become a type of blocks of 32."""
        return self._bytes_of(*SIMPLE)

    def _bytes_of(self, *types: str) -> int:
        before = self.source.tensors
        return sum(
            before[name].nbytes
            for name, info in self.tensors.items()
            if info.format.name in types and info.format is not before[name].format
        )

    def rows(self, info: TensorInfo) -> Rows:
        """The rows in their new type."""
        own = self.source.tensors[info.name]
        rows = self.source.rows(own)
        return (
            rows
            if own.format is info.format
            else _QuantizedRows(rows, own.format, info.format, self.label(info.name), self.fits, self.quantizer)
        )

    def release(self, info: TensorInfo) -> None:
        """As `Source.release`."""
        self.source.release(self.source.tensors[info.name])

    def label(self, name: str) -> str:
        """As `Source.label`."""
        return self.source.label(name)

    def identity(self) -> tuple[int, ...]:
        """As `Source.identity`."""
        return self.source.identity()


def _is_finer(layer: int, n_layers: int) -> bool:
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


@dataclass(frozen=True)
class _QuantizedRows:
    """Implements `Rows`."""

    rows: Rows
    source_format: Format
    format: Format
    label: str
    fits: Fits
    quantizer: Quantizer

    @property
    def shape(self) -> tuple[int, ...]:
        columns = self.rows.shape[1] // self.source_format.source_bytes
        return (self.rows.shape[0], columns // self.format.unit * self.format.source_bytes)

    def __getitem__(self, rows: slice) -> np.ndarray:
        raw = np.ascontiguousarray(self.rows[rows])
        out = np.empty((raw.shape[0], self.shape[1]), np.uint8)
        step = max(1, _QUANTIZED_BYTES // raw.shape[1])
        try:
            for first in range(0, raw.shape[0], step):
                part = raw[first : first + step]
                out[first : first + step] = self.quantizer(part, self.source_format.name, self.format.name, self.fits)
            return out
        except NotFinite as error:
            raise ConfigError(
                f"tensor {self.label}, rows {rows.start} to {rows.stop - 1}: {error}; expected finite weights: fetch "
                f"the model again, or leave --quant out",
                "quant",
            ) from None
