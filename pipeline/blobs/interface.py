"""What every blob store can do.  A blob is named by its key, is placed as a whole, and is read in ranges.

    key      "models/DIGEST/NAME.bin": parts joined by single slashes, none of which begins with a dot
    put      a reader sees the whole blob or none; without `replace` an existing blob is kept
    get      exactly the bytes asked for, or an error

Errors, the same for all stores (pipeline/errors.py):

    NotFound             there is no such blob
    Conflict             it exists already, and `replace` was not given
    ConfigError          the store refuses: credentials, permissions, an address that is no store; a retry is of no use
    ResourceError        the store is full, or a listing exceeds its bound
    StorageUnavailable   everything that a retry may cure: network, 429, 5xx, an answer of the wrong length
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

from pipeline.errors import InternalError, StorageUnavailable

MAX_KEY_CHARACTERS = 512
MAX_LISTED = 100_000  # blobs of one listing
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

Data = bytes | memoryview


class BlobInfo(NamedTuple):
    """A blob of a listing."""

    key: str
    nbytes: int
    modified: float = 0.0  # s since 1970, by the store's clock


class BlobStore(ABC):
    """A store. A context manager, which closes it. Its methods are called in one event loop."""

    address: str  # for messages; contains no secret
    can_list: bool = True
    can_write: bool = True
    can_sign: bool = False

    @abstractmethod
    async def size(self, key: str) -> int:
        """Bytes of a blob."""

    @abstractmethod
    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`."""

    @abstractmethod
    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        """Place a blob."""

    @abstractmethod
    async def scan(self, folder: str) -> list[BlobInfo]:
        """All blobs whose key begins with `folder/`, sorted by key; none if there is no such folder."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove a blob. Idempotent."""

    async def read(self, key: str, max_bytes: int) -> bytes:
        """A whole blob of at most `max_bytes`. A larger one is `StorageUnavailable`: it is not what was published."""
        nbytes = await self.size(key)
        if nbytes > max_bytes:
            raise StorageUnavailable(f"{self.address}/{key} has {nbytes:,} bytes, expected at most {max_bytes:,}")
        return await self.get(key, 0, nbytes) if nbytes else b""

    async def sign(self, keys: Sequence[str], valid_s: int) -> dict[str, str]:
        """By key: a URL that reads this blob and does nothing else, for `valid_s`. It is a secret.

        Only if `can_sign`: other stores need no credentials.
        """
        raise InternalError(f"{self.address} signs no URLs")

    async def close(self) -> None:  # noqa: B027  (a store without connections has nothing to close)
        """Release connections. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def check_key(key: str) -> str:
    """The key. Keys are made by this project, so that another one is a fault of it."""
    if len(key) > MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
        raise InternalError(f"{key[:80]!r} is not a key of a blob")
    return key


def check_range(offset: int, nbytes: int) -> None:
    """A range has at least one byte: stores disagree about empty ones."""
    if offset < 0 or nbytes < 1:
        raise InternalError(f"a range of {nbytes} bytes from {offset} cannot be read")


def wrong_length(where: str, offset: int, expected: int, found: int) -> StorageUnavailable:
    """The error of an answer with fewer or more bytes than were asked for."""
    return StorageUnavailable(f"{where}: {found:,} bytes from {offset:,}, expected {expected:,}")
