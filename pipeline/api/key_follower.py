"""Follows the key file for an event loop: a thread looks at the file, and a disk that stands still delays no stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pipeline.api.key_file import KeyFile

WAIT_S = 2.0  # that a request waits for a look; then the keys that were read last count


class KeyFollower:
    """`refresh` before each use of the keys: a change of the file counts from the next request on."""

    def __init__(self, file: KeyFile | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`file`: None if there is nothing to follow. `clock` in s."""
        self._file = file
        self._clock = clock
        self._begun = 0  # looks
        self._taken = 0  # number of the last look whose result is in use
        self._since = 0.0  # when the look that is under way has begun
        self._task: asyncio.Task[None] | None = None  # that look

    async def refresh(self) -> None:
        """Return after a look that began after this call, or after `WAIT_S`.

        Calls share looks: those that come during one wait for the next, which is one for all of them.  Only the first
        calls wait for a disk that stands still.
        """
        if self._file is None:
            return
        needed, deadline = self._begun + 1, self._clock() + WAIT_S
        while self._taken < needed:
            if self._task is None:
                self._since = self._clock()
                self._task = asyncio.ensure_future(self._look(self._file))
            left = min(deadline, self._since + WAIT_S) - self._clock()
            if left <= 0:
                return
            await asyncio.wait([self._task], timeout=left)

    async def _look(self, file: KeyFile) -> None:
        self._begun += 1
        number = self._begun
        try:
            file.take(await asyncio.to_thread(file.look))
        finally:
            self._taken = number
            self._task = None
