"""Reads a session's id from the stream of its turn, on its way to the client."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipeline.errors import StarlingError
from stages.orchestrator.forward import Out

SESSION = re.compile(rb'"session_id":"([^"\\]{1,256})"')


class SessionReader:
    """An `Out` that passes events on. session: as the first event that names one has it; "" before."""

    def __init__(self, out: Out) -> None:
        self.session = ""
        self.is_begun = False
        self._out = out

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Out`."""
        self.is_begun = True
        await self._out.begin(status, headers)

    async def write(self, data: bytes) -> None:
        """See `Out`."""
        self._read(data)
        await self._out.write(data)

    def write_now(self, data: bytes) -> bool:
        """See `Out`."""
        self._read(data)
        return self._out.write_now(data)

    def _read(self, data: bytes) -> None:
        if not self.session and (match := SESSION.search(data)):
            self.session = match[1].decode()

    async def fail(self, error: StarlingError) -> None:
        """See `Out`."""
        await self._out.fail(error)
