"""How fast this machine reads memory: the bound of decoding speed.

Each thread sums its own part of an array repeatedly and writes nothing.  The working set has the size of the model's
weights, because a CPU cache that holds half of it would double the figure.
"""

from __future__ import annotations

import os
import statistics
import threading
import time

import numba
import numpy as np


@numba.njit(nogil=True, cache=False)
def _read(words: np.ndarray) -> np.uint64:
    """Sum of (n,) u64; LLVM makes it a stream of vector loads."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def read_bandwidth(working_set_bytes: int, cores: list[int], seconds: float = 0.5, rounds: int = 5) -> float:
    """Median over rounds of bytes read per second, all cores together, one thread pinned to each."""
    words = np.ones(working_set_bytes // 8, np.uint64)
    return statistics.median(read_rate(words, cores, seconds) for _ in range(rounds))


def read_rate(words: np.ndarray, cores: list[int], seconds: float) -> float:
    """Bytes of (n,) u64 `words` that all cores together read per second, one thread pinned to each."""
    parts = np.array_split(words, len(cores))
    _read(parts[0][:8])
    spans: list[tuple[float, float, int]] = []
    start = threading.Barrier(len(cores))

    def run(part: np.ndarray, core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread only
        start.wait()
        begun, passes = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            _read(part)
            passes += 1
        spans.append((begun, time.perf_counter(), passes * part.nbytes))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(parts, cores, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(size / (end - begun) for begun, end, size in spans)
