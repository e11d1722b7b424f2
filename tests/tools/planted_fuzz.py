"""A fuzz target with planted faults: what the runner must find. The conditions need coverage to be met."""

from __future__ import annotations

import os

from tools.fuzz.target import Target

kept: list[int] = []


def _is(data: bytes, name: bytes) -> bool:
    """Compare in steps, so that each one is new code. Two bytes after the name must be large."""
    if data[:2] != name:
        return False
    if len(data) < 4 or data[2] < 128:
        return False
    return data[3] >= 128


def run(data: bytes) -> None:
    if len(data) > 4 and data[4] > 200:
        raise ValueError("documented")
    if _is(data, b"CR"):
        raise KeyError("planted")
    if _is(data, b"GR"):
        bytearray(1 << 30)  # more than a process that has run other tests may have free in its heap
    if _is(data, b"LE"):
        kept.append(os.dup(0))


TARGET = Target(
    run,
    seeds=lambda: [b"----", b"CR--", b"GR--", b"LE--"],
    errors=(ValueError,),
    modules=("tests.tools.planted_fuzz",),
    max_bytes=8,
    memory_mb=32,
)
