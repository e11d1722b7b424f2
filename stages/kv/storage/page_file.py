"""A file of pages (layout: spill.py) as a stranger reads it: whose it is, what is in it, is it sound."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import xxhash

from shm.pages import PAGE_FULL, PAGE_RECORD
from stages.kv.pool.headers import PageName, checksum, unpack_name
from stages.kv.storage.spill import BLOCK, HEAD, LAYOUT, MAGIC, STATE_AT

LOOKS = 3  # at a page that seems damaged: its writer may be at it


class PageFile:
    """Raises `OSError`, or `ValueError` with what is wrong with the file as a whole."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.identity = self._read_identity()
            self.page_bytes = int(self.identity["page_bytes"])
            self._slots_each = int(self.identity["slots"])
        except (KeyError, TypeError) as error:
            os.close(self._fd)
            raise ValueError(f"its identity lacks {error}") from None
        except BaseException:
            os.close(self._fd)
            raise
        self._extent_bytes = BLOCK + self._slots_each * self.page_bytes
        self.file_bytes = os.fstat(self._fd).st_size
        extents = max(0, self.file_bytes - BLOCK) // self._extent_bytes if self._slots_each else 0
        self.slots = extents * self._slots_each

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _read_identity(self) -> dict[str, Any]:
        head = os.pread(self._fd, BLOCK, 0)
        if len(head) < BLOCK or head[:8] != MAGIC:
            raise ValueError("it is no file of pages")
        _, layout, length, check = HEAD.unpack_from(head)
        packed = head[HEAD.size : HEAD.size + length]
        if layout != LAYOUT:
            raise ValueError(f"its layout is {layout}, expected {LAYOUT}")
        if xxhash.xxh3_64_intdigest(packed) != check:
            raise ValueError("its identity is damaged")
        identity: dict[str, Any] = msgspec.msgpack.decode(packed)
        return identity

    def _record(self, slot: int) -> bytes:
        extent, i = divmod(slot, self._slots_each)
        return os.pread(self._fd, PAGE_RECORD, BLOCK + extent * self._extent_bytes + i * PAGE_RECORD)

    def records(self) -> Iterator[tuple[int, PageName | None]]:
        """(slot, name) of every slot in use; None where the record is torn."""
        for slot in range(self.slots):
            record = self._record(slot)
            if int.from_bytes(record[STATE_AT : STATE_AT + 4], "little") == PAGE_FULL:
                yield slot, unpack_name(record)

    def is_sound(self, slot: int, name: PageName) -> bool:
        """Do the bytes fit the name? True as well when the slot has been given to another meanwhile."""
        extent, i = divmod(slot, self._slots_each)
        at = BLOCK + extent * self._extent_bytes + BLOCK + i * self.page_bytes
        for _ in range(LOOKS):
            content = np.frombuffer(os.pread(self._fd, self.page_bytes, at), np.uint8)
            if checksum(content) == name.checksum or unpack_name(self._record(slot)) != name:
                return True
        return False
