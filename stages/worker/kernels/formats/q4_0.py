"""Q4_0: 32 codes of 4 bits less 8, one f16 scale."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import NIBBLES, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import nibbles


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | codes 16."""
    return GgufFields(nibbles(raw[..., 2:18]), raw[..., :2])


Q4_0 = QuantizedFormat(2, "Q4_0", 32, 18, Codes(NIBBLES, zero=8), Scales(), _gguf)
