"""How many bytes of a text each token covers, for encoders that normalize it."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np
from numpy.typing import NDArray

Ends = Iterator[tuple[int, list[int]]]  # for each step: the place that it has reached, and where tokens end


def covered_bytes(text: str, n_tokens: int, steps: Ends) -> Generator[None, None, NDArray[np.int64]]:
    """Return the bytes that each token covers: what belongs to none counts for the next one, at the end for the last.

    steps: where the tokens of the text end, in characters and in order.  Yields between them.
    """
    covered = [np.zeros(1, np.int64)]  # bytes up to the end of each token
    at, n_bytes = 0, 0  # the last end, and the bytes up to it
    for _, ends in steps:
        if ends:
            before = n_bytes + np.append(0, np.cumsum(byte_sizes(text[at : ends[-1]]), dtype=np.int64))
            covered.append(before[np.array(ends) - at])
            at, n_bytes = ends[-1], int(before[-1])
        yield
    ends_in_bytes = np.concatenate(covered)
    lengths = np.zeros(n_tokens, np.int64)
    if len(ends_in_bytes) > 1:
        ends_in_bytes[-1] = n_bytes + len(text[at:].encode())
        lengths[: len(ends_in_bytes) - 1] = np.diff(ends_in_bytes)[:n_tokens]
    return lengths


def byte_sizes(text: str) -> NDArray[np.uint8]:
    """Return how many bytes of UTF-8 each character has."""
    if text.isascii():
        return np.ones(len(text), np.uint8)
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return 1 + (codes >= 0x80).astype(np.uint8) + (codes >= 0x800) + (codes >= 0x10000)
