"""Ordered access to shared 64-bit words from plain Python, without a compiler.

x86-64 (the only architecture the kernels support) orders aligned 8-byte loads as acquire and stores as
release, and NumPy reads and writes one aligned scalar by one `mov`.  What the hardware does reorder is
a store with a later load of another word: put `fence` between them (store HEAD, fence, look whether the
peer sleeps).  Jitted code uses `shm/atomics.py` on the same words.
"""

from __future__ import annotations

import threading

import numpy as np

_lock = threading.Lock()


def load(words: np.ndarray, index: int) -> int:
    """Acquire: what was stored before the value found here is visible after it."""
    return int(words[index])


def store(words: np.ndarray, index: int, value: int) -> None:
    """Release: whoever loads this value sees all stores before it."""
    words[index] = value


def fence() -> None:
    """No load after it is satisfied before the stores before it are visible to all."""
    # Taking a free lock is a locked compare-and-exchange, which is a full fence on x86-64.
    with _lock:
        pass
