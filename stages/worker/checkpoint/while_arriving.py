"""Converts a GGUF file while it is downloaded: each tensor as soon as its bytes are here.

The checkpoint is placed when the file is complete, has been hashed and is the one that was wanted (pipeline/models/
arriving.py); otherwise nothing is left.  An interrupted conversion is not continued: the bytes on the disk may be
replaced by others when the download goes on, and only the hash of the whole file would tell.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from pipeline.errors import ResourceError
from pipeline.models import store
from pipeline.models.arriving import Abandoned, ArrivingFile
from pipeline.models.locks import lock
from shm.partial_checkpoint import PartialCheckpoint
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.ingest import convert_arriving
from stages.worker.checkpoint.source import Rows, TensorInfo
from stages.worker.checkpoint.usable import is_usable

log = logging.getLogger("starling.checkpoint")


class ArrivingGguf(GgufFile):
    """A GGUF file of which not every byte is here. What is read is waited for. Raises `Abandoned` everywhere."""

    def __init__(self, file: ArrivingFile, opened: BinaryIO) -> None:
        """Read header, metadata and tensor table. Raises `GgufError`, `OSError`."""
        self._file = file
        super().__init__(file.path, opened)
        file.wait(0, self._at)  # arrays of numbers are views of bytes that `_take` has not read

    def _take(self, n: int) -> bytes:
        self._file.wait(self._at, self._at + n)
        return super()._take(n)

    def rows(self, info: TensorInfo) -> Rows:  # type: ignore[override]
        """As `GgufFile.rows`; each slice is waited for."""
        return _ArrivingRows(self._file, info.start, super().rows(info))


class _ArrivingRows:
    def __init__(self, file: ArrivingFile, start: int, rows: np.ndarray) -> None:
        self._file, self._start, self._rows = file, start, rows
        self.shape = rows.shape

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        first, end, _ = rows.indices(self.shape[0])
        self._file.wait(self._start + first * self.shape[1], self._start + end * self.shape[1])
        return self._rows[rows]


class IngestWhileArriving:
    """The reader of one download: a context manager, which ends the conversion if the download has failed.

    A file that cannot be converted is downloaded all the same: `problem` then says why.
    """

    def __init__(self, models_dir: Path, pretokenizer: str = "", progress: store.Progress = store.no_progress) -> None:
        """`progress`: called when the file is complete and the conversion is not."""
        self.problem = ""
        self._models_dir, self._pretokenizer, self._progress = models_dir, pretokenizer, progress
        self._file: ArrivingFile | None = None
        self._thread: threading.Thread | None = None
        self._is_complete = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, file: ArrivingFile) -> None:
        """As `Reader.begin`."""
        self.close()
        try:
            opened = file.path.open("rb")  # by the thread, it may have been moved to its place before
        except OSError as error:
            self._give_up(error)
            return
        self._file = file
        self._thread = threading.Thread(target=self._convert, args=(file, opened), name="ingest", daemon=True)
        self._thread.start()

    def accepted(self, digest: str) -> None:
        """As `Reader.accepted`."""
        if self._file is None or self._thread is None:
            return
        self._is_complete = True
        if is_usable(self._models_dir / f"{digest}.idx"):
            self._file.abandon()
        else:
            self._file.accept(digest)
        while self._thread.is_alive():  # with a limit, so that Ctrl-C interrupts it
            self._thread.join(1.0)

    def close(self) -> None:
        """As `Reader.close`."""
        if self._file is not None:
            self._file.abandon()
        if self._thread is not None:
            self._thread.join()
        self._file = self._thread = None

    def _convert(self, file: ArrivingFile, opened: BinaryIO) -> None:
        folder = self._models_dir / ".fetch" / f"ingest-{file.path.parent.name}-{file.path.name}"
        try:
            with opened, lock(self._models_dir, folder.name):  # by which `starling gc` knows that it is in use
                shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
                try:
                    source = ArrivingGguf(file, opened)
                    self._check_space(source, file)
                    partial = PartialCheckpoint(folder, "")
                    convert_arriving(
                        source, self._models_dir, self._report, self._pretokenizer, partial, file.wait_digest
                    )
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        except Abandoned:
            pass
        except Exception as error:  # whatever is wrong with the file: it is downloaded, and refused when it is used
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.problem = str(error)
        log.info("a file is not converted while it is downloaded", extra={"reason": self.problem})

    def _check_space(self, source: ArrivingGguf, file: ArrivingFile) -> None:
        """Raise `ResourceError` if the download could lack the space that the checkpoint takes."""
        stat = os.statvfs(self._models_dir)
        needed = sum(info.nbytes for info in source.tensors.values()) + file.missing_bytes
        if needed > (free := stat.f_bavail * stat.f_frsize):
            raise ResourceError(f"{self._models_dir} has {free:,} bytes free, {needed:,} are needed for both files")

    def _report(self, what: str, done: int, total: int) -> None:
        if self._is_complete:
            self._progress(what, done, total)
