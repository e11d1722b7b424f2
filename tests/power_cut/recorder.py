"""Records the operations on the files of a directory, and produces what a power cut at any moment may leave of them.

As in ALICE (Pillai et al., OSDI 2014): after any prefix of the operations, those that no later synchronization in the
prefix covers may be lost, each on its own or together, and the last write may be torn at a sector.

    data        writes, truncations and reservations of a file, until an fsync or fdatasync of the file
    names       created, renamed and removed files and directories, until an fsync of their directory

Files are recorded by their descriptors from `os.open`.  A file that was opened by the built-in `open` is recorded as a
whole when it is synchronized or renamed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECTOR = 512  # bytes that a disk writes completely or not at all
MAX_SINGLE = 8  # operations that are lost on their own, the latest ones


@dataclass
class Operation:
    """One change. `synced_by`: the index of the operation that makes it durable; -1: none."""

    kind: str  # write, truncate, create, rename, unlink, mkdir, sync, mark
    inode: int = -1  # of the file; of a sync: the file or directory
    path: Path | None = None
    target: Path | None = None
    offset: int = 0
    data: bytes = b""
    note: Any = None
    synced_by: int = -1


@dataclass
class State:
    """What a power cut may leave: `files` by path, `directories`, and the marks that were reached before it."""

    files: dict[Path, bytes]
    directories: set[Path]
    marks: list[Any] = field(default_factory=list)
    label: str = ""

    def write(self, root: Path) -> None:
        """Write it below `root`."""
        for directory in sorted(self.directories):
            (root / directory).mkdir()
        for path, content in self.files.items():
            (root / path).write_bytes(content)


class Recorder:
    """Use as a context manager; `root` is empty at the beginning and exists durably."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._patch = monkeypatch
        self._lock = threading.RLock()
        self._inode_of: dict[int, int] = {}  # by descriptor
        self._inodes: dict[Path, int] = {Path("."): 0}  # by path
        self._next = 1

    def mark(self, note: Any) -> None:
        """What has happened so far, for the checks."""
        self._add(Operation("mark", note=note))

    def __enter__(self) -> Recorder:
        for name in ("open", "close", "dup", "pwrite", "ftruncate", "truncate", "posix_fallocate"):
            self._wrap(name, getattr(self, f"_{name}"))
        for name in ("fsync", "fdatasync"):
            self._wrap(name, self._sync)
        for name in ("rename", "replace"):
            self._wrap(name, self._rename)
        for name in ("unlink", "mkdir"):
            self._wrap(name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _wrap(self, name: str, record: Callable[..., Any]) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return record(original, *args, **kwargs)

        self._patch.setattr(os, name, call)

    def _add(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)

    def _relative(self, path: Any) -> Path | None:
        try:
            return Path(path).absolute().relative_to(self.root)
        except (TypeError, ValueError):
            return None

    # ---------------------------------------------------------------- the calls

    def _open(self, original: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        where = self._relative(path)
        is_new = where is not None and not os.path.lexists(path)
        fd: int = original(path, flags, *args, **kwargs)
        if where is not None:
            if is_new:
                self._inodes[where] = self._next
                self._next += 1
                self._add(Operation("create", self._inodes[where], where))
            elif flags & os.O_TRUNC:
                self._add(Operation("truncate", self._inodes[where], offset=0))
            self._inode_of[fd] = self._inodes[where]
        return fd

    def _close(self, original: Any, fd: int) -> None:
        self._inode_of.pop(fd, None)
        original(fd)

    def _dup(self, original: Any, fd: int) -> int:
        new: int = original(fd)
        if fd in self._inode_of:
            self._inode_of[new] = self._inode_of[fd]
        return new

    def _pwrite(self, original: Any, fd: int, data: Any, offset: int) -> int:
        done: int = original(fd, data, offset)
        if fd in self._inode_of:
            raw = bytes(memoryview(data).cast("B")[:done])
            self._add(Operation("write", self._inode_of[fd], offset=offset, data=raw))
        return done

    def _ftruncate(self, original: Any, fd: int, size: int) -> None:
        original(fd, size)
        if fd in self._inode_of:
            self._add(Operation("truncate", self._inode_of[fd], offset=size))

    def _truncate(self, original: Any, path: Any, size: int) -> None:
        original(path, size)
        where = self._relative(path)
        if where is not None:
            self._add(Operation("truncate", self._inodes[where], offset=size))

    def _posix_fallocate(self, original: Any, fd: int, offset: int, size: int) -> None:
        before = os.fstat(fd).st_size
        original(fd, offset, size)
        if fd in self._inode_of and offset + size > before:
            self._add(Operation("truncate", self._inode_of[fd], offset=offset + size))

    def _sync(self, original: Any, fd: int) -> None:
        original(fd)
        inode = self._inode_of.get(fd)
        if inode is None:
            inode = self._adopt(Path(os.readlink(f"/proc/self/fd/{fd}")))
        if inode is None:
            return
        self._add(Operation("sync", inode))
        last = len(self.operations) - 1
        for operation in self.operations:
            if operation.synced_by < 0 and self._covers(inode, operation):
                operation.synced_by = last

    def _covers(self, inode: int, operation: Operation) -> bool:
        if operation.kind in ("write", "truncate"):
            return operation.inode == inode
        places = [path.parent for path in (operation.path, operation.target) if path is not None]
        return bool(places) and all(self._inodes.get(place) == inode for place in places)

    def _adopt(self, path: Path) -> int | None:
        """A file that was opened by the built-in `open`: it is created and written now."""
        where = self._relative(path)
        if where is None or not path.is_file():
            return None
        if where not in self._inodes:
            self._inodes[where] = self._next
            self._next += 1
            self._add(Operation("create", self._inodes[where], where))
        self._add(Operation("write", self._inodes[where], data=path.read_bytes()))
        return self._inodes[where]

    def _rename(self, original: Any, source: Any, target: Any) -> None:
        old, new = self._relative(source), self._relative(target)
        if old is not None and old not in self._inodes:
            self._adopt(Path(source))
        original(source, target)
        if old is not None and new is not None:
            self._add(Operation("rename", self._inodes[old], old, new))
            self._inodes[new] = self._inodes.pop(old)

    def _unlink(self, original: Any, path: Any, **kwargs: Any) -> None:
        original(path, **kwargs)
        where = self._relative(path)
        if where is not None:
            self._add(Operation("unlink", self._inodes.pop(where, -1), where))

    def _mkdir(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        original(path, *args, **kwargs)
        where = self._relative(path)
        if where is not None:
            self._inodes[where] = self._next
            self._next += 1
            self._add(Operation("mkdir", self._inodes[where], where))

    # ---------------------------------------------------------------- states

    def states(self) -> Iterator[State]:
        """Every state that a power cut may leave, with equal ones once."""
        seen = set()
        for end in range(len(self.operations) + 1):
            for label, lost, torn in self._choices(end):
                state = self._simulate(end, lost, torn)
                key = (tuple(sorted(state.files.items())), tuple(sorted(state.directories)), repr(state.marks))
                if key not in seen:
                    seen.add(key)
                    state.label = f"after {end} operations: {label}"
                    yield state

    def _choices(self, end: int) -> Iterator[tuple[str, set[int], dict[int, bytes]]]:
        """(what is lost, indices of lost operations, other data of torn writes) for a prefix."""
        kinds = ("write", "truncate", "create", "rename", "unlink", "mkdir")
        loose = [
            i
            for i, operation in enumerate(self.operations[:end])
            if operation.kind in kinds and not 0 <= operation.synced_by < end
        ]
        data = {i for i in loose if self.operations[i].kind in ("write", "truncate")}
        yield "nothing lost", set(), {}
        yield "all lost", set(loose), {}
        yield "data lost", data, {}
        yield "names lost", set(loose) - data, {}
        for i in loose[-MAX_SINGLE:]:
            yield f"operation {i} lost", {i}, {}
        for i in [i for i in loose if self.operations[i].kind == "write"][-MAX_SINGLE:]:
            operation = self.operations[i]
            if not self._overwrites(i):  # the new size reached the disk, and the data did not
                yield f"write {i} left zeros", set(), {i: bytes(len(operation.data))}
            for cut in range(-operation.offset % SECTOR, len(operation.data), SECTOR):
                if cut:
                    yield f"write {i} torn at {cut}", set(), {i: operation.data[:cut]}

    def _overwrites(self, index: int) -> bool:
        """Whether a write changes bytes that the file had before."""
        operation = self.operations[index]
        return any(
            earlier.inode == operation.inode
            and earlier.kind in ("write", "truncate")
            and earlier.offset + len(earlier.data) > operation.offset
            for earlier in self.operations[:index]
        )

    def _simulate(self, end: int, lost: set[int], torn: dict[int, bytes]) -> State:
        contents: dict[int, bytearray] = {}
        names: dict[Path, int] = {}
        directories: set[Path] = set()
        marks = []
        for i, operation in enumerate(self.operations[:end]):
            if operation.kind == "mark":
                marks.append(operation.note)
            if i in lost:
                continue
            if operation.kind == "write":
                content = contents.setdefault(operation.inode, bytearray())
                data = torn.get(i, operation.data)
                content.extend(bytes(max(0, operation.offset + len(data) - len(content))))
                content[operation.offset : operation.offset + len(data)] = data
            elif operation.kind == "truncate":
                content = contents.setdefault(operation.inode, bytearray())
                del content[operation.offset :]
                content.extend(bytes(operation.offset - len(content)))
            elif operation.kind == "create" and operation.path is not None:
                names[operation.path] = operation.inode
            elif operation.kind == "rename" and operation.path in names and operation.target is not None:
                names[operation.target] = names.pop(operation.path)
            elif operation.kind == "unlink" and operation.path is not None:
                names.pop(operation.path, None)
            elif operation.kind == "mkdir" and operation.path is not None:
                directories.add(operation.path)
        reached = {path for path in directories if all(p in directories or p == Path(".") for p in path.parents)}
        files = {
            path: bytes(contents.get(inode, b""))
            for path, inode in names.items()
            if path.parent == Path(".") or path.parent in reached
        }
        return State(files, reached, marks)
