"""A fuzz target: the code under test, and what may come out of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

TARGETS = Path(__file__).parent / "targets"


class Target(NamedTuple):
    """`run` gets any bytes. It may return or raise one of `errors`; anything else is a finding."""

    run: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]  # valid inputs that a corpus starts from
    errors: tuple[type[Exception], ...]  # documented: what the parser's callers handle
    modules: tuple[str, ...]  # modules under test: coverage is counted in them
    max_bytes: int = 4096  # of an input
    memory_mb: int = 32  # most that one input may allocate


def names() -> list[str]:
    """Names of all targets, in alphabetical order."""
    return sorted(path.stem for path in TARGETS.glob("*.py") if path.stem != "__init__")


def load(name: str) -> Target:
    """The target `name`, or the one of another module if `name` is dotted. Imports the code under test."""
    target = importlib.import_module(name if "." in name else f"tools.fuzz.targets.{name}").TARGET
    assert isinstance(target, Target)
    return target
