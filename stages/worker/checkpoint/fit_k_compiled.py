"""The fits of quantize_k.py as a compiled kernel: the same bytes, ten times as fast, on any number of threads.

Compiling takes seconds, once for a machine: the kernel is stored with the others (kernels/stored_code.py), and used
where it is stored already or where there is enough to quantize.
"""

from __future__ import annotations

import numpy as np

from pipeline.models.store import Progress
from stages.worker.checkpoint.conversion_kernel import is_loaded
from stages.worker.checkpoint.quantize_k import PLAIN, Fits
from stages.worker.kernels import compiled

NAME = "fit_k"
WORTH_BYTES = 64 << 20  # of weights: the plain fits take 3 s for them, and the compiler about as long
_WITH_MINIMUM, _SIGNED = 0, 1  # of stages/worker/kernels/fit_k.py, which imports the compiler
_LANES = 16


def choose_fits(weights_bytes: int, progress: Progress) -> Fits:
    """The fits for so many bytes of weights. Compiles the kernel if that is worth it."""
    if not is_loaded(NAME, weights_bytes >= WORTH_BYTES, progress):
        return PLAIN
    return Fits(_fit_with_minimum, _fit_signed)


def _fit_with_minimum(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _fit(_WITH_MINIMUM, x)


def _fit_signed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scale, _ = _fit(_SIGNED, x)
    return codes, scale


def _fit(kind: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`x` (32 or 16, n) f32: codes (as x), scale and minus the minimum (n,)."""
    n = x.shape[1]
    padded = np.ascontiguousarray(np.pad(x, ((0, 0), (0, -n % _LANES))) if n % _LANES else x)
    codes = np.empty_like(padded)
    scale, least = np.empty((2, padded.shape[1]), np.float32)
    scratch = np.empty(32 * _LANES, np.float32)
    compiled.fit_k(
        kind,
        padded.ctypes.data,
        padded.shape[1],
        codes.ctypes.data,
        scale.ctypes.data,
        least.ctypes.data,
        scratch.ctypes.data,
    )
    return codes[:, :n], scale[:n], least[:n]
