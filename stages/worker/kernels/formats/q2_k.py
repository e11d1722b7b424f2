"""Q2_K: super-blocks of 16 x 16 codes of 2 bits, with scales and minimums of 4 bits each."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import Codes, GgufFields, Plane, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import bit_pairs


def _gguf(raw: np.ndarray) -> GgufFields:
    """scales (low) and minimums (high) 16 | codes 64 | d f16 | dmin f16."""
    both = raw[..., :16]
    return GgufFields(bit_pairs(raw[..., 16:80]), raw[..., 80:82], raw[..., 82:84], both & 15, both >> 4)


Q2_K = QuantizedFormat(10, "Q2_K", 256, 84, Codes((Plane(2),)), Scales("u4", minimum=True, halves=True), _gguf)
