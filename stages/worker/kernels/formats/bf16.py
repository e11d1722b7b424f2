"""BF16: the upper halves of f32."""

from __future__ import annotations

from stages.worker.kernels.formats.description import DenseFormat

BF16 = DenseFormat(id=30, name="BF16", unit=1, source_bytes=2, element="bf16")
