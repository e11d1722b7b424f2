"""Q6_K: super-blocks of 16 x 16 codes of 6 bits less 32, with signed scales of 8 bits."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import SIX_BITS, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import bit_pairs, nibble_runs


def _gguf(raw: np.ndarray) -> GgufFields:
    """codes, low 128 | codes, high 64 | scales 16 | d f16."""
    codes = nibble_runs(raw[..., :128], 64) | bit_pairs(raw[..., 128:192]) << 4
    return GgufFields(codes, raw[..., 208:210], sub_scales=raw[..., 192:208])


Q6_K = QuantizedFormat(14, "Q6_K", 256, 210, Codes(SIX_BITS, zero=32), Scales("s8", halves=True), _gguf)
