"""Mapped files that outlive processes: one checked header, then raw bytes.

An arena is a plain file on tmpfs.  `create` reserves its memory with `posix_fallocate` (an unreserved map ends in
SIGBUS, which Python cannot catch) and places it by rename, so that no process sees half a header.  It may reserve the
first bytes only: the owner then calls `reserve` before any process uses more.  The first 4096 bytes are the header;
only the owner writes it.

    offset  size  field
    0       8     magic          b"STARLING"
    8       4     layout         version of the layout named by `kind`
    12      4     header_bytes   4096
    16      8     size           of the file, bytes
    24      8     generation     differs between arenas of one path; constant for the life of the file
    32      8     owner_pid
    40      8     owner_ticks    /proc/PID/stat field 22: with the pid, identifies the owner uniquely
    48      16    kind           ASCII, zero padded: "steps", "kv", "activations", ...
    64      32    digest         of the model (raw SHA-256), zeros when there is none
    96      4     meta_bytes
    100     ...   meta           msgpack: the geometry, which `attach` compares
    4088    8     reserved       bytes of the file that have memory; 0: all of them

The module that lays out the rest of the bytes says who writes them (`step_ring.py`, `pages.py`, ...).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shm import huge_pages, words
from shm.decoding import DECODE_ERRORS

MAGIC = b"STARLING"
HEADER_BYTES = 4096
_FIXED = struct.Struct("<8sIIQQQQ16s32sI")
assert _FIXED.size == 100
_RESERVED = struct.Struct("<Q")
_RESERVED_AT = HEADER_BYTES - _RESERVED.size
_META_BYTES_MAX = _RESERVED_AT - _FIXED.size
_OWNER = struct.Struct("<QQ")
_OWNER_AT = 32
assert struct.calcsize("<8sIIQQ") == _OWNER_AT

_libc = ctypes.CDLL(None)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h
_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14
_POPULATE_SLICE_BYTES = 1 << 20  # mapped in one call, about 0.25 ms of one core
_POPULATE_PAUSE = 9  # after each slice, times what it took: the thread takes a tenth of a core at most
_MAX_POPULATE_PAUSE_S = 0.05
_POPULATE_AFTER_S = 0.5  # a process that has just attached has steps to compute, for which others wait


class ArenaError(RuntimeError):
    """An arena cannot be created or must not be used; the message gives the reason and the remedy."""


def align(n: int, to: int = 64) -> int:
    """The smallest multiple of `to` that is at least `n`."""
    return -(-n // to) * to


def process_ticks(pid: int) -> int:
    """Start time of a process (clock ticks since boot); 0 when it has ended.

    Raises `OSError` when /proc cannot be read (no descriptor is left): callers reuse the pages of an ended process,
    so a failure must not count as one.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The command name may hold spaces and brackets: count fields after the last one.
            return int(f.read().rsplit(b")", 1)[1].split()[19])
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return 0


def unreserved_bytes(directory: Path) -> int:
    """Bytes that the files in `directory` will take beyond what they have: the holes of arenas that grow."""
    missing = 0
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                info = path.stat()
                missing += max(0, info.st_size - info.st_blocks * 512)
    return missing


def remove_stale_arenas(directory: Path, suffix: str, kept: Collection[str]) -> None:
    """Remove the arenas `NAME.suffix` whose names are not in `kept`, and partial ones that `create` left behind.

    Only for the one stage that creates arenas with this suffix.
    """
    for path in directory.glob(f"*.{suffix}"):
        if path.stem not in kept:
            path.unlink(missing_ok=True)
    for path in directory.glob(f".*.{suffix}.*"):
        path.unlink(missing_ok=True)


class Arena:
    """A mapped arena. `buffer` is everything after the header, as uint8.

    Use `create` or `attach`; `close` unmaps once no view is left, `unlink` removes the file.
    """

    def __init__(self, path: Path, fd: int, map_: memoryview, fields: tuple[Any, ...]) -> None:
        self.path = path
        self._fd = fd
        (
            _,
            self.layout,
            _,
            self.size,
            self.generation,
            self.owner_pid,
            self.owner_ticks,
            kind,
            self.digest,
            meta_bytes,
        ) = fields
        self.kind = kind.rstrip(b"\0").decode()
        try:
            packed = bytes(map_[_FIXED.size : _FIXED.size + meta_bytes])
            self.meta: dict[str, Any] = msgspec.msgpack.decode(packed, type=dict[str, Any])
        except DECODE_ERRORS as error:
            raise ArenaError(f"{path}: geometry in the header does not decode: {error}") from None
        self.buffer: np.ndarray = np.frombuffer(map_, np.uint8, offset=HEADER_BYTES)
        self._reserved: np.ndarray = np.frombuffer(map_, np.uint64, 1, _RESERVED_AT)

    # -------------------------------------------------------------- create and attach

    @classmethod
    def create(
        cls,
        path: Path,
        kind: str,
        layout: int,
        nbytes: int,
        meta: dict[str, Any],
        digest: bytes = bytes(32),
        generation: int = 1,
        reserved: int | None = None,
    ) -> Arena:
        """Create an arena of `nbytes` zero bytes, owned (and locked with flock) by this process.

        `reserved`: only so many of them get memory now, and the others with `reserve`. There must be room for all,
        beside what the other arenas in the directory have yet to reserve.

        Removes a file of that name first, because the file system may have no room for both; a process that still
        maps the old file keeps the old bytes, and their memory is free when it ends.
        Raises `ArenaError`, with the numbers when the file system is too small.
        """
        packed = msgspec.msgpack.encode(meta)
        if len(packed) > _META_BYTES_MAX:
            raise ArenaError(f"{path}: geometry of {len(packed)} bytes exceeds {_META_BYTES_MAX}")
        size = HEADER_BYTES + align(nbytes, 4096)
        first = size if reserved is None else min(size, HEADER_BYTES + align(reserved, 4096))
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in (path, *path.parent.glob(f".{glob.escape(path.name)}.*")):  # a killed `create` leaves the latter
                old.unlink(missing_ok=True)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArenaError(f"{path} cannot be created: {error.strerror}") from None
        try:
            file_system = os.statvfs(path.parent)
            free = max(0, file_system.f_bavail * file_system.f_frsize - unreserved_bytes(path.parent))
            try:
                if free < size:
                    raise OSError(errno.ENOSPC, "")
                os.posix_fallocate(fd, 0, first)
                os.ftruncate(fd, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                    raise ArenaError(f"{path} cannot be created: {error.strerror}") from None
                raise ArenaError(
                    f"{path}: needs {size:,} bytes but {path.parent} has {free:,} free; make "
                    f"the arena smaller (kv_cache_mb, max_batch_size) or free space there"
                ) from None
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fields = (
                MAGIC,
                layout,
                HEADER_BYTES,
                size,
                generation,
                os.getpid(),
                process_ticks(os.getpid()),
                kind.encode(),
                digest,
                len(packed),
            )
            os.pwrite(fd, _FIXED.pack(*fields) + packed, 0)
            if first < size:
                os.pwrite(fd, _RESERVED.pack(first), _RESERVED_AT)
            map_ = huge_pages.map_file(fd, size)
            os.rename(temporary, path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        return cls(path, fd, map_, fields)

    @classmethod
    def attach(
        cls,
        path: Path,
        kind: str,
        layout: int,
        meta: dict[str, Any] | None = None,
        digest: bytes | None = None,
        own: bool = False,
    ) -> Arena:
        """Map an existing arena after checking every header field.

        `meta` and `digest`, when given, must be equal.  `own` takes the writer's lock and writes this process into
        the header: for a successor, whose predecessor must have ended.
        Raises `FileNotFoundError`, or `ArenaError` with the field, its value and the expected one.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if own:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ArenaError(f"{path}: its writer is alive (file is locked)") from None
            head = os.pread(fd, HEADER_BYTES, 0)
            if len(head) < HEADER_BYTES:
                raise ArenaError(f"{path}: {len(head)} bytes, too short for a header")
            fields = _FIXED.unpack_from(head)
            actual = os.fstat(fd).st_size
            found_kind = fields[7].rstrip(b"\0").decode("ascii", "replace")
            for name, value, expected in (
                ("magic", fields[0], MAGIC),
                ("kind", found_kind, kind),
                ("layout", fields[1], layout),
                ("header_bytes", fields[2], HEADER_BYTES),
                ("size", fields[3], actual),
            ):
                if value != expected:
                    raise ArenaError(f"{path}: {name} is {value!r}, expected {expected!r}")
            if fields[9] > _META_BYTES_MAX:
                raise ArenaError(f"{path}: meta_bytes is {fields[9]}, at most {_META_BYTES_MAX}")
            if digest is not None and fields[8] != digest:
                raise ArenaError(f"{path}: belongs to model {fields[8].hex()[:16]}")
            map_ = huge_pages.map_file(fd, actual)
            arena = cls(path, fd, map_, fields)
            if meta is not None and arena.meta != meta:
                differing = sorted(k for k in arena.meta.keys() | meta.keys() if arena.meta.get(k) != meta.get(k))
                raise ArenaError(
                    f"{path}: geometry differs in "
                    + ", ".join(f"{k} ({arena.meta.get(k)!r}, not {meta.get(k)!r})" for k in differing)
                )
            if own:
                _OWNER.pack_into(map_, _OWNER_AT, os.getpid(), process_ticks(os.getpid()))
            return arena
        except BaseException:
            os.close(fd)
            raise

    # -------------------------------------------------------------- use

    def view(self, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array over `buffer[offset:]`. Raises `ArenaError` when it exceeds the arena."""
        dtype = np.dtype(dtype)
        count = math.prod(shape)  # not NumPy's, which wraps around
        end = offset + count * dtype.itemsize
        if offset < 0 or min(shape) < 0 or end > self.buffer.size:
            raise ArenaError(f"{self.path}: bytes {offset}..{end} outside 0..{self.buffer.size}")
        return self.buffer[offset:end].view(dtype).reshape(shape)

    @property
    def reserved(self) -> int:
        """Bytes of `buffer` that have memory."""
        end = words.load(self._reserved, 0)
        return (min(end, self.size) if end else self.size) - HEADER_BYTES

    def reserve(self, nbytes: int, huge: bool = False) -> bool:
        """Reserve memory for the first `nbytes` of `buffer`; for the owner. Raises `OSError`: then nothing changed.

        `huge`: in huge pages where the kernel grants them and what is new spans whole ones.  Returns whether it granted
        all that were asked for.
        """
        now, end = HEADER_BYTES + self.reserved, HEADER_BYTES + align(nbytes, 4096)
        if end > self.size:
            raise ArenaError(f"{self.path}: {nbytes} bytes cannot be reserved of {self.buffer.size}")
        if end <= now:
            return True
        is_granted = True
        try:
            if huge:
                is_granted = huge_pages.collapse(self._fd, self.buffer.ctypes.data - HEADER_BYTES, now, end)
            os.posix_fallocate(self._fd, now, end - now)
        except OSError:
            self._punch(now, end)
            raise
        words.store(self._reserved, 0, end)  # `pack_into` would store 0 before it: all of them have memory
        return is_granted

    def give_back(self, nbytes: int) -> None:
        """Free the memory behind the first `nbytes` of `buffer`, which nothing uses; for the owner.

        Those bytes are zero when they are reserved again. A file system without holes keeps the memory.
        """
        now, end = HEADER_BYTES + self.reserved, HEADER_BYTES + align(nbytes, 4096)
        if end >= now:
            return
        words.store(self._reserved, 0, end)  # first: a killed owner's successor reserves it again
        self._punch(end, now)

    def _punch(self, begin: int, end: int) -> None:
        """Free the memory of these bytes of the file."""
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _libc.fallocate(self._fd, mode, ctypes.c_int64(begin), ctypes.c_int64(end - begin))

    def populate(self) -> None:
        """As `populate`, of this arena."""
        populate([self])

    @property
    def is_in_place(self) -> bool:
        """Whether the file at `path` is this one."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    @property
    def inode(self) -> int:
        """Number of its file: no other file has it while one of its maps is open. Raises `OSError` when closed."""
        return os.fstat(self._fd).st_ino

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._fd < 0

    def close(self) -> None:
        """Release the lock and the map. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.buffer = np.empty(0, np.uint8)
            self._reserved = self._reserved.copy()  # a view as well: a reference to this object keeps no memory

    def unlink(self) -> None:
        """Remove the file; existing maps stay valid until they are closed."""
        self.path.unlink(missing_ok=True)


def populate(arenas: Sequence[Arena], cores: Collection[int] = ()) -> None:
    """Map the memory that is reserved into this process, in a background thread that takes a tenth of a core.

    Otherwise the first access maps a page, which costs time within a step, and the resident memory of the process keeps
    growing until every page has been accessed once.  The thread has the process's priority: one of the lowest could end
    only after everything else on a busy machine, and a killed process ends with its last thread.  It begins after
    `_POPULATE_AFTER_S`, and refers to no arena while it waits: the memory of one that was closed must be free when its
    successor is created.

    cores: those that the thread may run on; default: this thread's. A rank, which is pinned to one, gives more.
    """
    found = [weakref.ref(arena) for arena in arenas]
    threading.Thread(target=_populate, args=(found, cores), name="populate", daemon=True).start()


def _populate(arenas: Sequence[weakref.ref[Arena]], cores: Collection[int]) -> None:
    """Run by the thread of `populate`."""
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
    time.sleep(_POPULATE_AFTER_S)
    for arena in arenas:
        offset = 0
        begun = time.monotonic()
        while _populate_slice(arena, offset):
            time.sleep(min(_MAX_POPULATE_PAUSE_S, _POPULATE_PAUSE * (time.monotonic() - begun)))
            offset += _POPULATE_SLICE_BYTES
            begun = time.monotonic()


def _populate_slice(reference: weakref.ref[Arena], offset: int) -> bool:
    """Map a slice; False: it lies behind the last one, or the arena is closed."""
    arena = reference()
    if arena is None:
        return False
    buffer = arena.buffer  # keeps the map alive
    if arena.is_closed or offset >= arena.reserved:
        return False
    length = min(_POPULATE_SLICE_BYTES, arena.reserved - offset)
    place = ctypes.c_void_p((buffer.ctypes.data & -4096) + offset), ctypes.c_size_t(length)
    return not _libc.madvise(*place, _MADV_POPULATE_READ)  # ctypes releases the GIL during the call
