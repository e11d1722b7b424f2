"""A model that is still downloaded, shown to its engine, which starts meanwhile and computes layers as they arrive.

    HOME/arriving/DIGEST.idx       the index
    HOME/arriving/DIGEST.bin       a second name of the unfinished file, which stays when that gets its place
    HOME/arriving/DIGEST.arrival   how much of it is verified (shm/arrival.py)

HOME is that of the model's engines: in the models directory, which many processes use, a model appears when it is
complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

from pipeline.files import make_directory
from shm.arrival import ArrivalWriter, arrival_path
from shm.checkpoint import PIECE_BYTES, VERSION, CheckpointError, Index
from stages.agent.disk_threads import MODELS

log = logging.getLogger("starling.download")

FOLDER = "arriving"
BEAT_S = 1.0  # between two signs of life

OnShown = Callable[[Path], object]


class Showcase:
    """Shows a download in the home of an engine."""

    def __init__(self, home: Path, on_shown: OnShown) -> None:
        """`on_shown(folder)` is called when the engine can be started with it."""
        self._home = home
        self._folder = home / FOLDER
        self._on_shown = on_shown

    @contextlib.asynccontextmanager
    async def shown(
        self, part: Path, index: Index, raw: bytes, present: Callable[[], Collection[int]]
    ) -> AsyncIterator[Callable[[], None]]:
        """While a download runs. Yields what is to be called when pieces have arrived.

        part: the unfinished file, of its full size.  raw: of the index.  present: the pieces that are verified.
        A folder that cannot be made is logged: then the engine starts after the download.
        """
        try:
            # Cancelled, it ends first: the folder is removed by what has cancelled it.
            writer = await MODELS.uninterrupted(self._make, part, index, raw)
        except (OSError, CheckpointError) as error:
            log.warning("layers are computed after the download", extra={"reason": str(error)})
            yield lambda: None
            return
        if writer is None:
            yield lambda: None
            return
        leading = 0

        def advance() -> None:
            nonlocal leading
            here = present()
            while leading in here:
                leading += 1
            writer.advance(min(leading * PIECE_BYTES, index.bin_bytes))
            if leading == len(index.pieces):
                writer.finish(is_complete=True)

        async def beat() -> None:
            while True:
                writer.beat()
                await asyncio.sleep(BEAT_S)

        beats = asyncio.create_task(beat())
        try:
            self._on_shown(self._folder)
            yield advance
        finally:
            beats.cancel()
            writer.finish(is_complete=False)  # unless it is complete
            writer.close()

    def _make(self, part: Path, index: Index, raw: bytes) -> ArrivalWriter | None:
        """Make the folder anew; None for an index that has to be migrated first.

        Raises `OSError`, `CheckpointError`, and then leaves no folder.
        """
        remove_showcase(self._home)
        if index.version != VERSION or not index.is_current:
            return None
        try:
            make_directory(self._home)
            self._folder.mkdir(mode=0o700)
            index_path = self._folder / f"{index.digest}.idx"
            os.link(part, index_path.with_suffix(".bin"))
            index_path.write_bytes(raw)
            return ArrivalWriter(arrival_path(index_path))
        except OSError:
            remove_showcase(self._home)
            raise


def remove_showcase(home: Path) -> None:
    """Remove what has been shown in the home of an engine; processes that map the files keep them. Idempotent."""
    shutil.rmtree(home / FOLDER, ignore_errors=True)
