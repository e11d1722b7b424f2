"""The simple types of quantize.py as a compiled kernel: the same bytes, many times as fast, on any number of threads.

The kernel is compiled, stored and used as that of fit_k_compiled.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.models.store import Progress
from stages.worker.checkpoint.conversion_kernel import is_loaded
from stages.worker.checkpoint.quantize import BLOCK, quantize
from stages.worker.checkpoint.quantize_k import PLAIN, Fits
from stages.worker.checkpoint.source import dense_values
from stages.worker.kernels import compiled

NAME = "quantize_blocks"
WORTH_BYTES = 512 << 20  # of weights: NumPy's operations take seconds for them, and the compiler about as long
# Bytes of dense values (rows, row bytes) u8 and their type, the type wanted, the fits of K-quants; (rows, row bytes).
Quantizer = Callable[[np.ndarray, str, str, Fits], np.ndarray]

# As kernels/quantize_blocks.py, which imports the compiler, has them: kind, bits, bytes of a block.
_Q8_0, _SIGNED, _WITH_MINIMUM = 0, 1, 2
SIMPLE = {
    "Q4_0": (_SIGNED, 4, 18),
    "Q4_1": (_WITH_MINIMUM, 4, 20),
    "Q5_0": (_SIGNED, 5, 22),
    "Q5_1": (_WITH_MINIMUM, 5, 24),
    "Q8_0": (_Q8_0, 8, 34),
}
_DENSE = {"F32": (0, 4), "F16": (1, 2), "BF16": (2, 2)}  # number, bytes of a value
_PAD = 32  # bytes that the kernel may write behind the last block


def choose_quantizer(weights_bytes: int, progress: Progress) -> Quantizer:
    """What quantizes so many bytes to simple types. Compiles the kernel if that is worth it."""
    if weights_bytes and is_loaded(NAME, weights_bytes >= WORTH_BYTES, progress):
        return quantize_rows_compiled
    return quantize_rows


def quantize_rows(raw: np.ndarray, dense: str, wanted: str, fits: Fits = PLAIN) -> np.ndarray:
    """Rows of dense values (rows, row bytes) u8 to rows of blocks (rows, row bytes) u8. Raises `NotFinite`."""
    return quantize(dense_values(raw, dense), wanted, fits)


def quantize_rows_compiled(raw: np.ndarray, dense: str, wanted: str, fits: Fits = PLAIN) -> np.ndarray:
    """As `quantize_rows`. Call `choose_quantizer` first."""
    if wanted not in SIMPLE:
        return quantize_rows(raw, dense, wanted, fits)
    kind, bits, block_bytes = SIMPLE[wanted]
    number, value_bytes = _DENSE[dense]
    raw = np.ascontiguousarray(raw)
    blocks = raw.size // (BLOCK * value_bytes)
    padded = np.empty(blocks * block_bytes + _PAD, np.uint8)
    source, out = raw.ctypes.data, padded.ctypes.data
    if compiled.quantize_blocks(kind, bits, number, source, blocks, out) < blocks:
        return quantize_rows(raw, dense, wanted, fits)  # which raises, or knows what to do
    return padded[:-_PAD].reshape(raw.shape[0], -1)
