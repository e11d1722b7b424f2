"""Spill and persist files: read by `starling kv`, opened and read by the kv stage.

byte 0   bit 0: the rest is the head of a file, followed by its extents
         bit 1: the rest is an identity (msgpack) for a correct head
         otherwise it is records of a file with the right identity; a byte before each says what is correct in it:
         bit 0 its check, bit 1 its checksum, bit 2 its state
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import xxhash

from shm.pages import IDENTITY as RECORD_IDENTITY
from shm.pages import PAGE_FULL, PAGE_RECORD
from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import PageIdentity
from stages.kv.storage.page_file import BLOCK, CellLayout, PageFile, encode_head
from stages.kv.storage.page_file_writer import PageFileWriter
from tools.fuzz.parts import written
from tools.fuzz.target import Target

PAGE_BYTES, CELLS = 4096, 2
LAYOUT = CellLayout(PAGE_BYTES, CELLS)
IDENTITY: dict[str, Any] = {"digest": "ab", "page_bytes": PAGE_BYTES, "slots": CELLS}
PAGE_SUM = xxhash.xxh3_64_intdigest(bytes(PAGE_BYTES))


def _record(flags: int, raw: bytes) -> bytes:
    record = bytearray(raw.ljust(PAGE_RECORD, b"\0"))
    if flags & 2:
        record[48:56] = PAGE_SUM.to_bytes(8, "little")
    if flags & 1:
        record[64:72] = xxhash.xxh3_64_intdigest(bytes(record[:64])).to_bytes(8, "little")
    if flags & 4:
        record[72:76] = PAGE_FULL.to_bytes(4, "little")
    return bytes(record)


def _contents(data: bytes) -> bytes:
    mode, rest = data[:1] or b"\1", data[1:]
    if mode[0] & 1:
        return rest
    if mode[0] & 2:
        packed = rest[:4000]
        head = encode_head({})[:12] + len(packed).to_bytes(4, "little")
        head += xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little") + packed
        return head.ljust(BLOCK, b"\0") + bytes(3 * BLOCK)
    parts = [rest[at : at + 1 + PAGE_RECORD] for at in range(0, len(rest), 1 + PAGE_RECORD)]
    records = [_record(part[0], part[1:]) for part in parts]
    extents = b""
    for at in range(0, len(records), CELLS):
        extents += b"".join(records[at : at + CELLS]).ljust(BLOCK, b"\0") + bytes(CELLS * PAGE_BYTES)
    return encode_head(IDENTITY).ljust(BLOCK, b"\0") + extents


def run(data: bytes) -> None:
    """Read every page of the file with both readers."""
    path = written("pages", _contents(data))
    try:
        with PageFile(path) as file:
            for cell, identity in file.records():
                if identity is not None:
                    file.is_intact(cell, identity)
    except ValueError:
        pass  # documented
    fd = os.open(path, os.O_RDWR)
    writer = PageFileWriter(fd, LAYOUT)
    try:
        contents = writer.open(IDENTITY, max_extents=4)
        out = np.empty(PAGE_BYTES, np.uint8)
        assert len(contents.pages) + len(contents.free) == writer.n_extents * CELLS
        writer.prefetch(page.cell for page in contents.pages)
        for page in contents.pages:
            identity = writer.read(page.cell, page.page_hash, out)
            assert identity is None or identity.page_hash == page.page_hash
            writer.clear(page.cell)
        if writer.n_extents:
            writer.shrink()
        assert os.fstat(fd).st_size == writer.file_bytes
    finally:
        os.close(fd)


def seeds() -> Iterator[bytes]:
    """Files with good, torn and damaged records, and heads."""
    name = PageHash(bytes(range(16)))
    identity = RECORD_IDENTITY.pack(*PageIdentity(name, name, name, PAGE_SUM, 1, 16))
    records = b"".join(bytes([flags]) + identity.ljust(PAGE_RECORD, b"\0") for flags in (7, 6, 5, 0, 7))
    yield b"\0" + records
    yield b"\2" + msgspec.msgpack.encode(IDENTITY)
    for slots, page_bytes in ((1, 8192), (-1, 4096), (1000, 0), (1, float("inf")), (1 << 60, 4096), ("2", b"x")):
        yield b"\2" + msgspec.msgpack.encode({**IDENTITY, "slots": slots, "page_bytes": page_bytes})
    yield b"\1" + encode_head(IDENTITY)
    yield b"\1" + encode_head(IDENTITY).ljust(BLOCK, b"\0")


TARGET = Target(
    run,
    seeds,
    errors=(),
    modules=("stages.kv.storage.page_file", "stages.kv.storage.page_file_writer", "stages.kv.pool.page_headers"),
    max_bytes=8192,
)
