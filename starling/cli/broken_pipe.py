"""Output that nobody reads any more (a pipe whose reader has gone) ends no server."""

from __future__ import annotations

import os
from typing import TextIO


def silence(stream: TextIO) -> None:
    """From now on what is written to `stream`, and what it still holds, goes nowhere, and nothing fails for it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
