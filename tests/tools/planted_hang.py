"""A fuzz target with an endless loop. Alone: each input that meets it takes all of its time."""

from __future__ import annotations

from tools.fuzz.target import Target


def run(data: bytes) -> None:
    if len(data) > 1 and data[0] >= 128 and data[1] >= 128:
        while True:
            pass


TARGET = Target(run, seeds=lambda: [b"--"], errors=(), modules=("tests.tools.planted_hang",), max_bytes=4)
