"""Q3_K: super-blocks of 16 x 16 codes of 3 bits less 4, with scales of 6 bits less 32, which take 8 bits in `.bin`.

Codes are stored eight times as large, so that the zero point is 32, as in Q6_K: `d / 8` makes up for it exactly.
"""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import Codes, GgufFields, Plane, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import bit_pairs, bit_planes


def _gguf(raw: np.ndarray) -> GgufFields:
    """codes, high 32 | codes, low 64 | scales 12 (all low nibbles, then all bit pairs) | d f16."""
    codes = bit_pairs(raw[..., 32:96]) << 3 | bit_planes(raw[..., :32]) << 5
    low, high = raw[..., 96:104], raw[..., 104:108]
    scales = np.concatenate([low & 15, low >> 4], axis=-1)
    scales |= np.concatenate([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=-1)
    return GgufFields(codes, raw[..., 108:110], sub_scales=scales - np.uint8(32))


_CODES = Codes((Plane(2, at=3), Plane(1, at=5)), zero=32, step=8)
Q3_K = QuantizedFormat(11, "Q3_K", 256, 110, _CODES, Scales("s8", halves=True), _gguf)
