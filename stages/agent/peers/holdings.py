"""What this agent can give to others: pieces of pulled files and of running downloads.

A piece is compared with its checksum each time before it is given: a damaged file on this disk costs others nothing.
Only models with a record of a publication are given; checkpoints that were prepared here stay here.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from pipeline.errors import NotFound
from pipeline.fleet.bodies import MAX_CLAIMED, PieceState
from shm.checkpoint import PIECE_BYTES, CheckpointError, load_index, n_pieces, piece_checksum

log = logging.getLogger("starling.agent.pieces")

MAX_INDEXES = 8  # whose checksums are kept in memory


class FileKey(NamedTuple):
    """A `.bin`: releases may lay the tensors of one GGUF file out differently."""

    digest: str  # SHA-256 of the GGUF file, hex
    checksum: str  # of all pieces of the `.bin`, hex

    @classmethod
    def of(cls, entry: Entry) -> FileKey:
        """The key of a published model."""
        return cls(entry.digest, entry.weights_checksum)


class Progress(Protocol):
    """A running download."""

    @property
    def present(self) -> Collection[int]:
        """Pieces that are verified and written."""

    @property
    def claimed(self) -> Collection[int]:
        """Pieces that it reads from a blob store now."""


class _Download(NamedTuple):
    path: Path
    checksums: list[int]
    nbytes: int
    progress: Progress
    on_question: Callable[[str], None]


class _Complete(NamedTuple):
    stat: tuple[int, int, int]  # of the index: inode, mtime, size
    checksums: list[int]
    nbytes: int


class Holdings:
    """The files of one models directory. `state` and `read` read files: call them in a thread."""

    def __init__(self, models_dir: Path) -> None:
        self.models_dir = models_dir
        self._downloads: dict[FileKey, _Download] = {}
        self._complete: OrderedDict[FileKey, _Complete] = OrderedDict()

    def begin(
        self,
        entry: Entry,
        path: Path,
        checksums: list[int],
        progress: Progress,
        on_question: Callable[[str], None] = lambda agent_id: None,
    ) -> None:
        """A download runs: its pieces are given from the unfinished file `path`.

        on_question: called in the event loop with the id of each agent that asks what is here.
        """
        self._downloads[FileKey.of(entry)] = _Download(path, checksums, entry.weights_bytes, progress, on_question)

    def note_question(self, key: FileKey, agent_id: str) -> None:
        """An agent asks what is here. `agent_id`: as it says."""
        running = self._downloads.get(key)
        if running is not None:
            running.on_question(agent_id)

    def end(self, entry: Entry) -> None:
        """The download has ended."""
        self._downloads.pop(FileKey.of(entry), None)

    def keys(self) -> list[FileKey]:
        """The files that this agent holds or downloads, the last used ones first. Reads the records."""
        running = list(self._downloads)
        records = sorted(pulled.read_all(self.models_dir), key=lambda found: -found[1])
        complete = [FileKey.of(one.entry) for one, _ in records if pulled.is_complete(self.models_dir, one.entry)]
        return list(dict.fromkeys(running + complete))

    def state(self, key: FileKey) -> PieceState:
        """Which pieces it can give. Raises `NotFound`."""
        running = self._downloads.get(key)
        if running is not None:
            present = bytearray(-(-len(running.checksums) // 8))
            for piece in list(running.progress.present):
                present[piece >> 3] |= 1 << (piece & 7)
            claimed = tuple(sorted(running.progress.claimed)[:MAX_CLAIMED])
            return PieceState(pieces=len(running.checksums), present=bytes(present), claimed=claimed)
        return PieceState(pieces=len(self._file(key).checksums), is_complete=True)

    def read(self, key: FileKey, piece: int) -> bytes:
        """A verified piece. Raises `NotFound`."""
        running = self._downloads.get(key)
        if running is not None and piece in running.progress.present:
            for path in (running.path, self.models_dir / f"{key.digest}.bin"):  # the second if it has just been placed
                data = _pread(path, piece, running.nbytes)
                if data and piece_checksum(data) == running.checksums[piece]:
                    return data
        found = self._file(key)
        if not 0 <= piece < len(found.checksums):
            raise NotFound(f"the file has {len(found.checksums)} pieces, no piece {piece}")
        data = _pread(self.models_dir / f"{key.digest}.bin", piece, found.nbytes)
        if not data or piece_checksum(data) != found.checksums[piece]:
            log.warning("a piece of a cached file is damaged", extra={"digest": key.digest, "piece": piece})
            raise NotFound(f"piece {piece} is damaged here")
        return data

    def _file(self, key: FileKey) -> _Complete:
        """A complete file with a record. Raises `NotFound`."""
        path = self.models_dir / f"{key.digest}.idx"
        try:
            found = path.stat()
            stat = (found.st_ino, found.st_mtime_ns, found.st_size)
            known = self._complete.get(key)
            if known is not None and known.stat == stat:
                return known
            recorded = any(FileKey.of(one.entry) == key for one, _ in pulled.read_all(self.models_dir))
            index = load_index(path) if recorded else None
        except (OSError, CheckpointError):
            index = None
        if index is None or index.pieces_digest != key.checksum or len(index.pieces) != n_pieces(index.bin_bytes):
            raise NotFound(f"no file {key.digest[:16]}... with the checksum {key.checksum} is here")
        self._complete[key] = known = _Complete(stat, index.pieces, index.bin_bytes)
        while len(self._complete) > MAX_INDEXES:
            self._complete.popitem(last=False)
        return known


def _pread(path: Path, piece: int, nbytes: int) -> bytes:
    """The bytes of a piece; empty if they cannot be read."""
    offset = piece * PIECE_BYTES
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, min(PIECE_BYTES, nbytes - offset), offset)
    except OSError:
        return b""
    finally:
        os.close(fd)
