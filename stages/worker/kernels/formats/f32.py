"""F32: floats as they are."""

from __future__ import annotations

from stages.worker.kernels.formats.description import DenseFormat

F32 = DenseFormat(id=0, name="F32", unit=1, source_bytes=4, element="f32")
