"""How many bytes of a text each token covers, for encoders that normalize it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from stages.tokenizer.chunked_encode import SpecialTokenFinder


def covered_bytes(
    names: SpecialTokenFinder, text: str, n_tokens: int, ends_in: Callable[[str], Iterable[int]]
) -> NDArray[np.int64]:
    """Return the bytes that each token covers: what belongs to none counts for the next one, at the end for the last.

    ends_in: of the tokens of a text without names, in characters.
    """
    ends: list[int] = []
    at = 0
    while at < len(text):
        name = names.find(text, at, len(text))
        end = name[0] if name is not None else len(text)
        ends += [at + n for n in ends_in(text[at:end])]
        at = end
        if name is not None:
            at = name[1]
            ends.append(at)
    lengths = np.zeros(n_tokens, np.int64)
    if ends:
        ends[-1] = len(text)
        sizes = np.fromiter((len(c.encode()) for c in text), np.int64, len(text))
        covered = np.concatenate([[0], np.cumsum(sizes)])[[0, *ends]]
        lengths[: len(ends)] = np.diff(covered)[:n_tokens]
    return lengths
