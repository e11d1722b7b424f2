"""Q4_K: super-blocks of 8 x 32 codes of 4 bits, with scales and minimums of 6 bits, which take 8 bits in `.bin`."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import NIBBLES, Codes, GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import nibble_runs, six_bit_scales


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | dmin f16 | scales and minimums 12 | codes 128."""
    return GgufFields(nibble_runs(raw[..., 16:144], 32), raw[..., :2], raw[..., 2:4], *six_bit_scales(raw[..., 4:16]))


Q4_K = QuantizedFormat(12, "Q4_K", 256, 144, Codes(NIBBLES), Scales("u8", minimum=True), _gguf)
