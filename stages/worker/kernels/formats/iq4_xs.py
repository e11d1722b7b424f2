"""IQ4_XS: super-blocks of 8 x 32 codes of IQ4_NL, with scales of 6 bits less 32, which take 8 bits in `.bin`."""

from __future__ import annotations

import numpy as np

from stages.worker.kernels.formats.description import GgufFields, QuantizedFormat, Scales
from stages.worker.kernels.formats.gguf_fields import nibble_runs
from stages.worker.kernels.formats.iq4_nl import UNEVEN


def _gguf(raw: np.ndarray) -> GgufFields:
    """d f16 | scales, high 2 (bit pairs of a u16) | scales, low 4 (nibbles) | codes 128."""
    high, low = raw[..., 2:4], raw[..., 4:8]
    shifts = np.array([0, 2, 4, 6], np.uint8)
    scales = np.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:-1], 8)
    scales |= (high[..., None] >> shifts & 3).reshape(*high.shape[:-1], 8) << 4
    return GgufFields(nibble_runs(raw[..., 8:136], 16), raw[..., :2], sub_scales=scales - np.uint8(32))


IQ4_XS = QuantizedFormat(23, "IQ4_XS", 256, 136, UNEVEN, Scales("s8"), _gguf)
