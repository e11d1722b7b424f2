"""IQ4_NL: 32 codes of 4 bits that name 16 uneven steps, one f16 scale."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import NIBBLES, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import nibbles

_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's `kvalues_iq4nl`


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | codes 16."""
    return GgufFields(nibbles(raw[..., 2:18]), raw[..., :2])


UNEVEN = Codes(NIBBLES, zero=128, table=tuple(step + 128 for step in _STEPS))
IQ4_NL = QuantizedFormat(20, "IQ4_NL", 32, 18, UNEVEN, Scales(), _gguf)
