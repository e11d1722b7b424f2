"""A client's response that keeps what an orchestrator writes to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.api import sse
from pipeline.api.error_response import error_event
from pipeline.errors import StarlingError


class Received:
    """It takes all writes at once."""

    def __init__(self) -> None:
        self.is_begun = False
        self.data = b""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_begun = True

    async def write(self, data: bytes) -> None:
        self.data += data

    def write_now(self, data: bytes) -> bool:
        self.data += data
        return True

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        self.data += sse.event(error_event(error, open_choices))
