"""Q5_1: 32 codes of 5 bits, an f16 scale and an f16 minimum."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import FIVE_BITS, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import bits, nibbles


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | m f16 | fifth bits 4 | codes 16."""
    return GgufFields(nibbles(raw[..., 8:24]) | bits(raw[..., 4:8]) << 4, raw[..., :2], raw[..., 2:4])


Q5_1 = QuantizedFormat(7, "Q5_1", 32, 24, Codes(FIVE_BITS), Scales(minimum=True), _gguf)
