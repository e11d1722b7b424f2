"""Output to a pipe whose reader has closed it: it is discarded, so that the server goes on."""

from __future__ import annotations

import os
from typing import TextIO


def silence(stream: TextIO) -> None:
    """Discard what `stream` still buffers and all that is written to it later. Writing no longer fails."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
