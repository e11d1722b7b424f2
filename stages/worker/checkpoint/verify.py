"""Verifies the `.bin` of a checkpoint against the checksums of its `.idx`, with all cores.

    DIGEST.verified   identity of the `.bin` that was verified last, and the checksums that it was compared with

A worker verifies before it is ready, unless the record matches: then no byte is read.  A file that has been written,
replaced or restored since has another identity.  Decay of the medium changes no identity, so `starling verify` reads
everything.  Both fail with the file, the tensor and the piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec
import numpy as np

from pipeline.models.vocabulary_tables import make_tables
from shm.checkpoint import (
    PIECE_BYTES,
    VERSION,
    VERSION_WITHOUT_PIECES,
    Checkpoint,
    CheckpointError,
    Index,
    load_index,
    n_pieces,
    piece_checksum,
    write_index,
)
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.checkpoint")

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
PHASE = "verify"
_REPORT_S = 0.05  # between two calls of a progress function
_NAMED = 3  # damaged tensors that a message names

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14


class Record(msgspec.Struct, frozen=True):
    """What was verified: the identity of the file, and the checksums."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    pieces: str  # `Index.pieces_digest`


def verify_once(checkpoint: Checkpoint, progress: Progress) -> bool:
    """Verify unless the record shows that this very file was verified; whether it was read.

    Raises `CheckpointError` as `verify` does.
    """
    expected = _record_of(checkpoint)
    if _read_record(checkpoint.path) == expected:
        return False
    verify(checkpoint, progress)
    return True


def verify(checkpoint: Checkpoint, progress: Progress) -> None:
    """Read the whole `.bin`, and write or remove the record.

    Raises `CheckpointError` that names the file, the damaged tensors and the first damaged piece.
    """
    index = checkpoint.index
    damaged: dict[int, int] = {}  # piece -> checksum found

    def check(piece: int) -> int:
        data = checkpoint.piece(piece)
        read_in(checkpoint, piece, data)
        found = piece_checksum(data.data)
        if found != index.pieces[piece]:
            damaged[piece] = found
        return data.nbytes

    try:
        _for_each(n_pieces(index.bin_bytes), check, index.bin_bytes, progress)
        if damaged:
            raise CheckpointError(_message(checkpoint, damaged))
    except CheckpointError:
        with contextlib.suppress(OSError):
            record_path(checkpoint.path).unlink(missing_ok=True)
        raise
    _write_record(checkpoint)


def migrate(index_path: Path, progress: Progress) -> Index:
    """Replace the `.idx` of an older version: compile its vocabulary, and make the pieces if it has none.

    Without pieces the weights are verified by their tensors' checksums.

    Raises `CheckpointError` (a tensor is damaged), `OSError`.
    """
    index = load_index(index_path)
    if index.version == VERSION_WITHOUT_PIECES:
        index = _with_pieces(index_path, progress)
    replaced = msgspec.structs.replace(index, version=VERSION)
    write_index(index_path, replaced, make_tables(index.tokenizer))
    log.info("checkpoint index migrated", extra={"path": str(index_path), "from": index.version, "to": VERSION})
    return replaced


def _with_pieces(index_path: Path, progress: Progress) -> Index:
    checkpoint = Checkpoint(index_path)
    tensors, index = checkpoint.index.tensors, checkpoint.index

    def check(number: int) -> int:
        if checkpoint.is_damaged(tensors[number]):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {tensors[number].name} differs from its checksum: the file is damaged; "
                f"{_remedy(checkpoint)}"
            )
        return tensors[number].nbytes

    _for_each(len(tensors), check, index.bin_bytes, progress)
    pieces = [piece_checksum(checkpoint.piece(i).data) for i in range(n_pieces(index.bin_bytes))]
    return msgspec.structs.replace(index, pieces=pieces)


def _for_each(count: int, work: Callable[[int], int], total: int, progress: Progress) -> None:
    """Call `work(number)`, which returns the bytes done, for all numbers in as many threads as there are cores."""
    done = 0
    next_report = 0.0
    progress(PHASE, 0, total)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "verify") as pool:
        futures = [pool.submit(work, number) for number in range(count)]
        try:
            for future in as_completed(futures):
                done += future.result()
                if (now := time.monotonic()) >= next_report:
                    next_report = now + _REPORT_S
                    progress(PHASE, min(done, total), total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    progress(PHASE, total, total)


def read_in(checkpoint: Checkpoint, piece: int, data: np.ndarray) -> None:
    """Map the piece's pages at once. The kernel reads ahead meanwhile, in huge pages where it can (shm/huge_pages.py).

    An unreadable disk is an error here, where the access to a mapped page would be a SIGBUS.
    """
    address = data.ctypes.data
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(data.nbytes), _MADV_POPULATE_READ):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # an older kernel: the access maps the pages
            reason = "an I/O error" if number == errno.EFAULT else os.strerror(number)
            names = ", ".join(t.name for t in checkpoint.index.tensors_in(piece)) or "padding"
            raise CheckpointError(
                f"{checkpoint.path}: piece {piece} (bytes {piece * PIECE_BYTES}..{piece * PIECE_BYTES + data.nbytes}, "
                f"of {names}) cannot be read: {reason}; check the disk, then {_remedy(checkpoint)}"
            )


def _message(checkpoint: Checkpoint, damaged: dict[int, int]) -> str:
    index, first = checkpoint.index, min(damaged)
    end = min((first + 1) * PIECE_BYTES, index.bin_bytes)
    touched = {t.name: t for piece in sorted(damaged) for t in checkpoint.index.tensors_in(piece)}
    names = [name for name, tensor in touched.items() if checkpoint.is_damaged(tensor)] or ["none (padding)"]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{checkpoint.path}: tensor {', '.join(names[:_NAMED])}{more}: piece {first} (bytes {first * PIECE_BYTES}.."
        f"{end}) has checksum {damaged[first]:016x}, expected {index.pieces[first]:016x}; {len(damaged)} of "
        f"{len(index.pieces)} pieces are damaged: check the disk, then {_remedy(checkpoint)}"
    )


def _remedy(checkpoint: Checkpoint) -> str:
    return f"remove {checkpoint.path.with_suffix('.idx')} to ingest the model again"


# ------------------------------------------------------------------ the record


def record_path(path: Path) -> Path:
    """Path of the record that belongs to a `.bin` or `.idx`."""
    return path.with_suffix(".verified")


def _record_of(checkpoint: Checkpoint) -> Record:
    info = checkpoint.info
    return Record(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, checkpoint.index.pieces_digest)


def _read_record(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(record_path(path).read_bytes(), type=Record)
    except (OSError, *DECODE_ERRORS):  # missing or damaged: the file is verified again
        return None


def _write_record(checkpoint: Checkpoint) -> None:
    """Several processes may verify a file at once, so each has a temporary file of its own."""
    path = record_path(checkpoint.path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(_record_of(checkpoint)))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        log.warning("verification is not recorded, every start repeats it", extra={"path": str(path), "reason": reason})
