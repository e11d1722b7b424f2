"""agent.json: the agent's id, its incarnation, and the models that its successor loads again.

Used by `Models` (models.py), which says what has changed, and by the stage, which writes the first state.  It does not
know what the names mean.

Each write waits for the disk twice (`fsync`), for seconds if that is busy.  So it runs in a thread, while the event
loop renews the lease.  One write runs at a time, and each begins with the names of that moment: no earlier state
replaces a later one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.files import replace_file
from pipeline.runtime.steady_clock import read_boot_id
from shm.decoding import DECODE_ERRORS
from stages.agent.disk_threads import STATE


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file."""

    agent_id: str
    incarnation: str
    models: tuple[str, ...] = ()  # that are placed, or still to be restored
    place: str = ""  # where the agent ran, see `place_of`


def place_of(agent_dir: Path) -> str:
    """The name of this directory, on this host, since its boot; "" if the kernel has none.

    A copy of the directory has another one: the agent that wrote the file may live where it was copied from.
    """
    boot, found = read_boot_id(), agent_dir.stat()
    return f"{boot}:{found.st_dev}:{found.st_ino}" if boot else ""


def read_stored(path: Path) -> Stored | None:
    """What the agent that ran here before has stored."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stored)
    except (OSError, *DECODE_ERRORS):
        return None


def write_stored(agent_dir: Path, stored: Stored) -> None:
    """Replace agent.json, and wait for the disk. Raises `OSError`."""
    replace_file(agent_dir / "agent.json", msgspec.json.encode(stored), durable=True)


class StateFile:
    """The file of a running agent. Used in one event loop."""

    def __init__(self, agent_dir: Path, stored: Stored, names: Callable[[], tuple[str, ...]]) -> None:
        """`stored`: of this agent. `names`: of the models to store, called in the event loop before each write."""
        self._agent_dir = agent_dir
        self._stored = stored
        self._names = names
        self._is_due = False
        self._writing: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """The names have changed: write them as soon as the write before has ended."""
        self._is_due = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def finish(self) -> None:
        """Wait until all changes are written, or cannot be. A caller that is cancelled ends no write."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def store(self) -> None:
        """The names have changed: write them, and wait for the end."""
        self.changed()
        await self.finish()

    async def _write(self) -> None:
        while self._is_due:
            self._is_due = False
            stored = msgspec.structs.replace(self._stored, models=self._names())
            with contextlib.suppress(OSError):  # a restart then loads fewer models
                await STATE.run(write_stored, self._agent_dir, stored)
