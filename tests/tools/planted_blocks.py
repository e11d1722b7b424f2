"""A fuzz target that ends its process at one input, as a fault in compiled code does."""

from __future__ import annotations

import os
import signal

from tools.fuzz.target import Target


def run(data: bytes) -> None:
    if data[:1] == b"K":
        os.kill(os.getpid(), signal.SIGSEGV)


TARGET = Target(run, seeds=lambda: [b"x"], errors=(), modules=("tests.tools.planted_blocks",), max_bytes=2)
