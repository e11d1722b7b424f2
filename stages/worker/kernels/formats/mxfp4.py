"""MXFP4: 32 codes of 4 bits that name floats of 2 bits of exponent and 1 of mantissa; one scale, a power of two.

The table has the floats times 2, as ggml's, and the scale is half of what the format defines.  Codes are stored with a
zero point of 16, so that they take 5 bits.
"""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import NIBBLES, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import nibbles

_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # ggml's `kvalues_mxfp4`


def _gguf(raw: np.ndarray) -> GgufFields:
    """exponent 1 | codes 16."""
    return GgufFields(nibbles(raw[..., 1:17]), raw[..., :1])


_CODES = Codes(NIBBLES, zero=16, table=tuple(step + 16 for step in _STEPS))
MXFP4 = QuantizedFormat(39, "MXFP4", 32, 17, _CODES, Scales("e8m0"), _gguf)
