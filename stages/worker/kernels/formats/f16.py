"""F16: IEEE halves."""

from __future__ import annotations

from stages.worker.kernels.formats.description import DenseFormat

F16 = DenseFormat(id=1, name="F16", unit=1, source_bytes=2, element="f16")
