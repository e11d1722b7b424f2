"""Q8_0: 32 signed bytes, one f16 scale. Codes are the bytes plus 128."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import BYTES, Codes, GgufFields, QuantizedFormat, Scales


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | values 32."""
    return GgufFields(raw[..., 2:34] ^ 0x80, raw[..., :2])


Q8_0 = QuantizedFormat(8, "Q8_0", 32, 34, Codes(BYTES, zero=128), Scales(), _gguf)
