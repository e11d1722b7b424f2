"""Q4_1: 32 codes of 4 bits, an f16 scale and an f16 minimum."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import NIBBLES, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import nibbles


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | m f16 | codes 16."""
    return GgufFields(nibbles(raw[..., 4:20]), raw[..., :2], raw[..., 2:4])


Q4_1 = QuantizedFormat(3, "Q4_1", 32, 20, Codes(NIBBLES), Scales(minimum=True), _gguf)
