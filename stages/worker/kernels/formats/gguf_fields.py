"""Bit fields in the order that GGUF blocks have them; u8 arrays, the last axis is taken apart."""

from __future__ import annotations

import numpy as np


def nibbles(packed: np.ndarray) -> np.ndarray:
    """(..., n) to (..., 2 n): the low halves of all bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def bits(packed: np.ndarray) -> np.ndarray:
    """(..., n) to (..., 8 n) of 0 and 1: bit 0 of byte 0 first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def bit_planes(packed: np.ndarray) -> np.ndarray:
    """(..., 32) to (..., 256) of 0 and 1: bit 0 of all bytes, then bit 1 of all bytes ..."""
    planes = packed[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return planes.reshape(*packed.shape[:-1], -1)


def bit_pairs(packed: np.ndarray) -> np.ndarray:
    """(..., 64) to (..., 256) of 0 to 3: for each half of 32 bytes, bits 0-1 of all of them, then bits 2-3 ..."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    pairs = packed.reshape(*packed.shape[:-1], 2, 1, 32) >> shifts & 3
    return pairs.reshape(*packed.shape[:-1], -1)


def nibble_runs(packed: np.ndarray, run: int) -> np.ndarray:
    """As `nibbles`, for each `run` bytes by themselves."""
    return nibbles(packed.reshape(*packed.shape[:-1], -1, run)).reshape(*packed.shape[:-1], -1)


def six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(..., 12) to eight scales and eight minimums of 6 bits (ggml's `get_scale_min_k4`)."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    return scales, minimums
