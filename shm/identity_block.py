"""The first bytes of a file or transfer of pages: what it is, and of which version.

0    8 bytes of magic, layout u32, length u32 and XXH3-64 u64 of the identity, little-endian
24   the identity, msgpack; its maker fills the block with zeros
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import xxhash

from shm.decoding import DECODE_ERRORS

BLOCK_BYTES = 4096

_HEAD = struct.Struct("<8sIIQ")


def encode_identity(magic: bytes, layout: int, identity: dict[str, Any]) -> bytes:
    """Return the first bytes, without the zeros."""
    packed = msgspec.msgpack.encode(identity, order="deterministic")
    return _HEAD.pack(magic, layout, len(packed), xxhash.xxh3_64_intdigest(packed)) + packed


def decode_identity(block: bytes, magic: bytes, layout: int) -> dict[str, Any]:
    """Return the identity of a whole block. Raises `ValueError` with what is wrong."""
    if len(block) < BLOCK_BYTES or block[:8] != magic:
        raise ValueError(f"it does not begin with {magic.decode()}")
    _, found, length, check = _HEAD.unpack_from(block)
    packed = block[_HEAD.size : _HEAD.size + length]
    if found != layout:
        raise ValueError(f"its layout is {found}, expected {layout}: another release has written it")
    if xxhash.xxh3_64_intdigest(packed) != check:
        raise ValueError("its identity is damaged")
    try:
        return msgspec.msgpack.decode(packed, type=dict[str, Any])
    except DECODE_ERRORS as error:
        raise ValueError(f"its identity does not decode: {error}") from None
