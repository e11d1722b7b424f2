"""Ordered access to shared 64-bit words from plain Python, without a compiler.

x86-64 (the only architecture that the kernels support) orders aligned 8-byte loads as acquire and stores as release,
and NumPy reads and writes one aligned scalar by one `mov`.  The hardware does reorder a store with a later load of
another word: put `fence` between them (store HEAD, fence, check whether the peer sleeps).  Jitted code uses
`shm/atomics.py` on the same words.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np

_lock = threading.Lock()
_libc = ctypes.CDLL(None)
_SYS_FUTEX, _FUTEX_WAKE, _EVERY_WAITER = 202, 1, 0x7FFFFFFF


def load(words: np.ndarray, index: int) -> int:
    """Load with acquire order: stores before the one that wrote this value are visible afterwards."""
    return int(words[index])


def store(words: np.ndarray, index: int, value: int) -> None:
    """Store with release order: a process that loads this value sees all earlier stores."""
    words[index] = value


def fence() -> None:
    """Order all earlier stores before all later loads."""
    # Taking a free lock is a locked compare-and-exchange, which is a full fence on x86-64.
    with _lock:
        pass


def wake(words: np.ndarray, index: int) -> None:
    """Wake all processes that sleep on the low half of a word (`atomics.futex_wait`)."""
    address = ctypes.c_void_p(words.ctypes.data + words.itemsize * index)
    _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERY_WAITER, None, None, 0)
