"""Whether a file has changed since the last question, by inotify: one system call that never waits for a disk.

`fd` is readable when there is an answer to read, for an event loop.

The kernel queues an event before the call that changes the file returns.  A question that is asked after a change
therefore finds it.  Not seen are changes that another machine makes on a network file system, and changes through a
memory mapping or another hard link: look at the file itself now and then, too.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

# linux/inotify.h
_ATTRIB, _CLOSE_WRITE, _MODIFY = 0x4, 0x8, 0x2
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_UNMOUNT, _OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_ONLY_DIRECTORY = 0x1000000
_WATCHED = _ATTRIB | _CLOSE_WRITE | _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_LOST = _DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED  # events after which the directory is not watched
_EVENT = struct.Struct("iIII")  # watch descriptor, mask, cookie, length of the name
_READ_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """Watches one name in one directory. `arm` may be called in another thread; everything else belongs to one.

    suffixes: of further files beside it, whose changes count as its own.
    """

    def __init__(self, path: Path, suffixes: Sequence[str] = ()) -> None:
        self._path = path
        self._suffixes = ("", *suffixes)
        self._names: frozenset[bytes] = frozenset()  # in the watched directory: files, or the next directory to them
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch = -1
        self._is_exchanged = False  # the directory has been, since the last question
        self._poll = select.poll()
        if self._fd >= 0:  # at the user's limit of instances there is none, and `arm` is never true
            self._poll.register(self._fd, select.POLLIN)
            self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def fd(self) -> int:
        """The descriptor; -1: there is none, and `has_changed` is always true."""
        return self._fd

    def arm(self) -> bool:
        """Watch the file's directory, or the nearest one that exists. Whether changes from now on are seen.

        Examines the disk.
        """
        if self._fd < 0:
            return False
        for below in (self._path, *self._path.parents):
            watch = self._add(below.parent)
            if watch < 0 and below.parent != below:
                continue
            if watch != self._watch and self._watch >= 0:
                # Events of the old directory are no reason for `has_changed` from the next line on: this flag is.
                # A loop that waits for `fd` is woken by them, or by the one that the removal queues.
                self._is_exchanged = True
                _libc.inotify_rm_watch(self._fd, self._watch)
            self._watch = watch
            suffixes = self._suffixes if below == self._path else ("",)
            self._names = frozenset(os.fsencode(below.name + suffix) for suffix in suffixes)
            # A directory that was made before its parent was watched, or a link, whose target is not watched.
            try:
                return watch >= 0 and not below.is_symlink() and (below == self._path or not below.exists())
            except OSError:
                return False
        return False

    def close(self) -> None:
        """Give the descriptor back, which no event loop may wait for any more. Idempotent; then as without one."""
        if self._fd >= 0:
            self._fd = -1
            self._close()

    def _add(self, directory: Path) -> int:
        mask = _WATCHED | _DELETE_SELF | _MOVE_SELF | _ONLY_DIRECTORY
        return int(_libc.inotify_add_watch(self._fd, os.fsencode(directory), mask))

    def has_changed(self) -> bool:
        """Whether the file may have changed since the last call, or `arm` must be called again.

        True once also after `arm` has exchanged the directory that is watched: others may have waited for the old one.
        """
        if self._fd < 0:
            return True
        found = False
        if self._is_exchanged:  # another exchange before the next line is reported by this call, too
            self._is_exchanged, found = False, True
        if not self._poll.poll(0):  # takes less time than a read that fails
            return found
        while True:
            try:
                raw = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return found
            at = 0
            while at < len(raw):
                watch, mask, _, length = _EVENT.unpack_from(raw, at)
                name = raw[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                is_lost = bool(mask & _LOST) and watch == self._watch
                found = found or is_lost or bool(mask & _OVERFLOW) or name in self._names
