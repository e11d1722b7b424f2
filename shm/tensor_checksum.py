"""The checksum of a tensor in a checkpoint: "xxh3:" and XXH3-128 in hex; of older releases BLAKE2b-128 in hex."""

from __future__ import annotations

import hashlib
from typing import Any

import xxhash

_PREFIX = "xxh3:"


class TensorChecksum:
    """Computes a checksum, at the speed of memory."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        """The next bytes, a buffer. Releases the interpreter lock."""
        self._state.update(data)

    @property
    def text(self) -> str:
        """Of all bytes so far."""
        return f"{_PREFIX}{self._state.hexdigest()}"


def has_checksum(data: Any, expected: str) -> bool:
    """Whether a buffer has this checksum, of this release or an older one."""
    if not expected.startswith(_PREFIX):
        return hashlib.blake2b(data, digest_size=16).hexdigest() == expected
    found = TensorChecksum()
    found.update(data)
    return found.text == expected
