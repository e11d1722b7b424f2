"""Reads the index of a version that is loaded, on a thread: a disk that hangs must keep no model waiting."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from shm.checkpoint import Index, load_index

log = logging.getLogger("starling.scheduler")


class IndexReader:
    """Reads one at a time: while one is read, others are not. Nothing waits for what is read here."""

    def __init__(self, models_dir: Path, wake: Callable[[], None]) -> None:
        """`wake` is called on the thread when there is something to `take`."""
        self._models_dir = models_dir
        self._wake = wake
        self._is_reading = False
        self._read: tuple[str, Index] | None = None

    def begin(self, version: ModelVersion) -> None:
        """Read the index of a version, unless that of another one is being read."""
        if not self._is_reading:
            self._is_reading = True  # before: the thread may end at once
            try:
                threading.Thread(target=self._run, args=(version,), name="index", daemon=True).start()
            except RuntimeError as error:  # there are too many
                self._is_reading = False
                log.info("no step arena ahead", extra={"version": version.id, "reason": str(error)})

    def take(self) -> tuple[str, Index] | None:
        """The id of a version and its index, once."""
        read, self._read = self._read, None
        return read

    def _run(self, version: ModelVersion) -> None:
        try:
            index_path = versions.find_index(version, self._models_dir)
            if index_path is not None:
                self._read = version.id, load_index(index_path)
        except Exception as error:  # whatever the file holds: the worker reports it
            log.info("no step arena ahead", extra={"version": version.id, "reason": str(error)})
        self._is_reading = False
        with contextlib.suppress(OSError):  # the stage has ended
            self._wake()
