"""Q5_K: as Q4_K, with codes of 5 bits."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import FIVE_BITS, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import bit_planes, nibble_runs, six_bit_scales


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | dmin f16 | scales and minimums 12 | fifth bits 32 | codes 128."""
    codes = nibble_runs(raw[..., 48:176], 32) | bit_planes(raw[..., 16:48]) << 4
    return GgufFields(codes, raw[..., :2], raw[..., 2:4], *six_bit_scales(raw[..., 4:16]))


Q5_K = QuantizedFormat(13, "Q5_K", 256, 176, Codes(FIVE_BITS), Scales("u8", minimum=True), _gguf)
