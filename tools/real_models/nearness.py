"""Whether two greedy texts are equal up to near ties.

Two engines round differently, so that where the two likeliest tokens are nearly as likely, each may take another one;
everything behind that place differs.  What counts is how far apart the two are with exact weights and activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Parting(NamedTuple):
    """The first place where two texts differ; a token of -1 is the text's end."""

    place: int
    ours: int
    theirs: int


def first_parting(ours: Sequence[int], theirs: Sequence[int]) -> Parting | None:
    """The first difference of two texts of token ids; None if they are equal."""
    for place in range(max(len(ours), len(theirs))):
        pair = tuple(text[place] if place < len(text) else -1 for text in (ours, theirs))
        if pair[0] != pair[1]:
            return Parting(place, *pair)
    return None


def margin(parting: Parting, exact: np.ndarray, ends: Sequence[int]) -> float:
    """Difference of the exact log probabilities of the two tokens, nats, at the place where the texts part.

    exact: logits of that place, (vocab,).  ends: the tokens that end a text; the likeliest one stands for -1.
    """
    end = max(ends, key=lambda token: exact[token])
    ours, theirs = (float(exact[end if token < 0 else token]) for token in parting[1:])
    return abs(ours - theirs)


def noise(exact: np.ndarray, quantized: np.ndarray, best: int = 2) -> float:
    """How much roundings move the margin between likely tokens, nats: the standard deviation over the positions.

    exact, quantized: logits, (positions, vocab); the margin is that between the `best` likeliest tokens.
    """
    order = np.argsort(exact, axis=1)[:, -best:]
    rows = np.arange(len(exact))[:, None]
    exact_gap, gap = (np.diff(logits[rows, order].astype(np.float64), axis=1) for logits in (exact, quantized))
    return float(np.sqrt(np.mean((gap - exact_gap) ** 2)))
