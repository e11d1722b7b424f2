"""Generators that do long work in steps, so that their caller handles other requests in between."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def each_step(steps: Generator[object, None, T], at: int) -> Generator[tuple[int, list[int]], None, T]:
    """Yield `at` without tokens for each step: the place in the text that was reached. Returns the steps' result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        yield at, []


def result_of(steps: Generator[object, None, T]) -> T:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
