"""Q5_0: 32 codes of 5 bits less 16, one f16 scale."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import FIVE_BITS, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import bits, nibbles


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | fifth bits 4 | codes 16."""
    return GgufFields(nibbles(raw[..., 6:22]) | bits(raw[..., 2:6]) << 4, raw[..., :2])


Q5_0 = QuantizedFormat(6, "Q5_0", 32, 22, Codes(FIVE_BITS, zero=16), Scales(), _gguf)
