"""What a burst took of memory goes back to the system.

glibc gives free memory back only from the end of its heap, and keeps ever more of it there once large buffers
have been freed.  So the largest texts of the day would stay what a process weighs: the pieces of one of 4 MB
take hundreds of MB while it is tokenized.  `malloc_trim` gives back what is free anywhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from pipeline.procfs import anonymous_bytes

SLACK_BYTES = 32 << 20  # that may be kept
LOOK_S = 10.0  # between two looks
AGAIN_S = 60.0  # from one trim to the next when nothing was added: it may have been in use


def trim() -> None:
    """Give back all free pages of the C library's heap. 0.07 ms for each MB given back, else 0.1."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps less
    if function is not None:
        function(0)


class MallocTrimmer:
    """One per process; `tick` often. `clock`: s, monotonic."""

    def __init__(
        self,
        clock: Callable[[], float],
        used: Callable[[], int] = anonymous_bytes,
        trim: Callable[[], None] = trim,
    ) -> None:
        self._clock = clock
        self._used = used
        self._trim = trim
        self._least = self._left = used()  # ever, and after the last trim
        self._next = self._again = clock() + LOOK_S

    def tick(self) -> None:
        """Look every `LOOK_S`; trim when there is more than `SLACK_BYTES` above the least that it has been."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LOOK_S
        used = self._used()
        self._least = min(self._least, used)
        if used - self._least <= SLACK_BYTES or (used - self._left <= SLACK_BYTES and now < self._again):
            return
        self._trim()
        self._left = self._used()
        self._again = now + AGAIN_S
