"""The list of denied certificates, followed while the process runs: serial numbers and names, one a line.

It is read by itself, so that a certificate that cannot be used at that moment does not hold a denial back.  New
contents are read once they have stood unchanged from one check to the next.  A list with an error changes nothing, and
is logged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable

from pipeline.errors import ConfigError
from pipeline.tls import follower
from pipeline.tls.certificate import read_file

log = logging.getLogger("starling.tls")

PARAM = "fleet.tls.denied"
_NAME = re.compile(r"(?:agent|orchestrator|monitor):[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SERIAL = re.compile(r"[0-9A-Fa-f]+(:[0-9A-Fa-f]+)*")

_State = tuple[int, ...] | None
_UNREAD: _State = ()  # of no file: it is read again at the next check


class DeniedList:
    """Holds the entries in force. Call `tick` often, in an event loop."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file; "": nothing is denied. Raises `ConfigError`."""
        self._path = path
        self._clock = clock
        self._state = self._seen = _state(path)
        self.entries: frozenset[str] = frozenset()  # another object after each change
        if path:
            self.entries = read_denied(read_file(path, PARAM), path)
        self._refusal = ""  # the last one, which is logged
        self._next_check = clock() + follower.CHECK_S
        self._task: asyncio.Task[None] | None = None

    def tick(self) -> None:
        """Check the file if it is time, unless a check is under way."""
        if self._path and self._task is None and self._clock() >= self._next_check:
            self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        try:
            found = await asyncio.to_thread(self._read_changed)
            if found is not None and found != self.entries:
                self.entries = found
                log.info("took a new list of denied certificates", extra={"file": self._path, "entries": len(found)})
        finally:
            self._next_check = self._clock() + follower.CHECK_S
            self._task = None

    def _read_changed(self) -> frozenset[str] | None:
        """In a thread: the new entries, or None if there are none or the file has an error."""
        state, before = _state(self._path), self._seen
        self._seen = state
        if state == self._state or state != before:
            return None
        self._state = state
        try:
            found = read_denied(read_file(self._path, PARAM), self._path)
        except (ConfigError, OSError) as error:
            reason = error.message if isinstance(error, ConfigError) else str(error)
            if reason != self._refusal:
                log.error("the list of denied certificates before it stays in force", extra={"reason": reason})
            self._refusal = reason
            self._state = _UNREAD
            return None
        self._refusal = ""
        return found


def serial_of(text: str) -> str:
    """A serial number in the form in which they are compared."""
    return text.replace(":", "").lstrip("0").upper()


def read_denied(data: bytes, path: str) -> frozenset[str]:
    """The entries of a list; `#` begins a comment. Raises `ConfigError`."""
    found = set()
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        entry = line.partition("#")[0].strip()
        if _NAME.fullmatch(entry):
            found.add(entry)
        elif _SERIAL.fullmatch(entry):
            found.add(serial_of(entry))
        elif entry:
            raise ConfigError(
                f"{PARAM}: {path}, line {number}: {entry[:80]!r} is neither a serial number in hexadecimal "
                "digits nor a name as agent:ID",
                PARAM,
            )
    return frozenset(found)


def _state(path: str) -> _State:
    """What changes when the file is replaced, written or given other permissions; links are followed."""
    try:
        info = os.stat(path)
        return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
    except OSError:
        return None
