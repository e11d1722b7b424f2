"""Follows the key file for an event loop: a thread checks the file, and a disk that stands still delays no stream.

While the kernel reports changes of the file (pipeline/runtime/file_watch.py), only a change is a reason to check it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pipeline.api.key_file import KeyFile, Look
from pipeline.runtime.file_watch import FileWatch

WAIT_S = 2.0  # that a request waits for a check; then the keys that were read last count
UNSEEN_S = 1.0  # between two checks of a watched file: changes that the kernel does not report count after this time


class KeyFollower:
    """`refresh` before each use of the keys: a change of the file counts from the next request on."""

    def __init__(
        self, file: KeyFile | None, clock: Callable[[], float] = time.monotonic, watch: FileWatch | None = None
    ) -> None:
        """`file`: None if there is nothing to follow. `clock` in s. `watch`: of the file; none: each call checks."""
        self._file = file
        self._clock = clock
        self._watch = watch
        self._is_watched = False  # changes since the last check that is in use are reported
        self._checked_at = 0.0  # when the last check has begun
        self._begun = 0  # checks
        self._taken = 0  # number of the last check whose result is in use
        self._needed = 0  # number of the first check that sees every reported change
        self._task: asyncio.Task[None] | None = None  # the check that is under way

    async def refresh(self) -> None:
        """Return after a check that sees every change from before this call, or after `WAIT_S`.

        Calls share checks: those that need one while another is under way wait for the next, which is one for all of
        them.  Only the first calls wait for a disk that stands still.
        """
        file = self._file
        if file is None:
            return
        if self._watch is None or not self._is_watched or self._watch.has_changed():
            self._needed = self._begun + 1
        elif self._taken >= self._needed:
            if self._task is None and self._clock() - self._checked_at >= UNSEEN_S:
                self._begin(file)
            return
        needed, deadline = self._needed, self._clock() + WAIT_S
        while self._taken < needed:
            task = self._task or self._begin(file)
            left = min(deadline, self._checked_at + WAIT_S) - self._clock()
            if left <= 0:
                return
            await asyncio.wait([task], timeout=left)

    def _begin(self, file: KeyFile) -> asyncio.Task[None]:
        self._checked_at = self._clock()
        self._task = asyncio.ensure_future(self._look(file))
        return self._task

    async def _look(self, file: KeyFile) -> None:
        self._begun += 1
        number = self._begun
        is_watched = False
        try:
            is_watched, found = await asyncio.to_thread(self._examine, file)
            file.take(found)
        finally:
            self._is_watched = is_watched
            self._taken = number
            self._task = None

    def _examine(self, file: KeyFile) -> tuple[bool, Look]:
        """In a thread. It is watched first, so that no change is between the two."""
        is_watched = self._watch is not None and self._watch.arm()
        return is_watched, file.look()
