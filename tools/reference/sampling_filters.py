"""The steps min_p, top_n_sigma, typical_p, XTC and DRY of the reference sampler, as docs/numerics.md defines them."""

from __future__ import annotations

import math

import numpy as np

from tools.reference.arithmetic import exp
from tools.reference.candidates import Candidates, block_sums, log, running

_F = np.float32
_LOWEST = np.float32(-3.0e38)
_V_MAX = 3.0e38


def _keep(c: Candidates, kept: np.ndarray) -> None:
    """Of the whole vocabulary the others get -inf, of a list they are dropped."""
    if c.whole:
        c.values[~kept] = -np.inf
    else:
        c.ids, c.values = c.ids[kept], c.values[kept]


def _total(c: Candidates, values: np.ndarray) -> float:
    return running(block_sums(values) if c.whole else list(values))


def min_p(c: Candidates, p: float) -> None:
    """Keep what has at least `p` times the highest probability."""
    top = c.values.max()
    if top > -np.inf:
        _keep(c, c.values >= _F(float(top) - log(1.0 / float(_F(p)))))


def top_n_sigma(c: Candidates, sigmas: float) -> None:
    """Keep what is at most `sigmas` standard deviations below the highest value."""
    top = c.values.max()
    if top == -np.inf:
        return
    finite = c.values > -np.inf
    values = np.where(finite, c.values, _F(0)).astype(np.float64)
    count = int(finite.sum())
    mean = _total(c, values) / count
    squares = np.where(finite, (values - mean) * (values - mean), 0.0)
    deviation = math.sqrt(_total(c, squares) / count)
    _keep(c, c.values >= _F(float(top) - float(_F(sigmas)) * deviation))


def typical_p(c: Candidates, p: float) -> None:
    """Keep the candidates whose information is closest to the entropy, until they have the share `p`."""
    top = c.values.max()
    if top == -np.inf:
        return
    weights = c.weights()
    total = _total(c, weights)
    distances = np.maximum(c.values - top, _LOWEST)
    mean = _F(_total(c, weights * distances.astype(np.float64)) / total)
    # Information is log(total) - distance, and the entropy is log(total) - mean.
    order = np.lexsort((c.ids, np.abs(distances - mean)))
    c.ids, c.values = c.ids[order], c.values[order]
    enough, sum_, n = float(_F(p)) * total, 0.0, 0
    for weight in exp(c.values - top).astype(np.float64):
        sum_ += weight
        n += 1
        if sum_ > enough:
            break
    c.keep(n)
    c.sort()


def xtc(c: Candidates, threshold: float) -> None:
    """Of the candidates with a probability of at least `threshold`, drop all but the last."""
    weights = c.weights()
    found = (weights > 0) & (weights >= float(_F(threshold)) * _total(c, weights))
    if found.sum() < 2:
        return
    at = np.flatnonzero(found)
    lowest = at[c.values[at] == c.values[at].min()]
    found[lowest[-1]] = False
    _keep(c, ~found)


def dry(
    c: Candidates, tokens: list[int], last_n: int, breakers: set[int], multiplier: float, base: float, allowed: int
) -> None:
    """Lower the candidates that would lengthen a repetition of the last tokens, by its length; quadratic."""
    text = tokens if last_n < 0 else tokens[len(tokens) - min(last_n, len(tokens)) :]
    limit = next((i for i, token in enumerate(reversed(text)) if token in breakers), len(text))
    if len(text) <= allowed or limit < allowed:
        return
    longest: dict[int, int] = {}
    for end in range(len(text) - 1):  # an earlier place that ends like the text
        length = 0
        while length <= end and text[end - length] == text[-1 - length]:
            length += 1
        length, token = min(length, limit), text[end + 1]
        if length >= allowed and token not in breakers:
            longest[token] = max(longest.get(token, 0), length)
    for at, token in enumerate(c.ids.tolist()):
        if token in longest:
            c.values[at] -= _penalty(multiplier, base, longest[token] - allowed)


def _penalty(multiplier: float, base: float, exponent: int) -> np.float32:
    result, square = 1.0, float(_F(base))
    while exponent > 0:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return _F(min(float(_F(multiplier)) * result, _V_MAX))
