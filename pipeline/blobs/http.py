"""Blobs of a web server, read by HTTP ranges: a mirror of a published folder, or a bucket that is public.

Read-only, and without listings: HTTP has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from yarl import URL

from pipeline.blobs.interface import BlobInfo, BlobStore, Data, check_key
from pipeline.blobs.ranged_get import RangeReader
from pipeline.errors import ConfigError

REDIRECTS = 4


class HttpStore(BlobStore):
    """The blobs below `address`, an http(s) URL."""

    can_list = False
    can_write = False

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        """`clock`: s since 1970, to read a `Retry-After` that is a date."""
        self.address = address.rstrip("/")
        self._reader = RangeReader(clock, REDIRECTS)
        try:
            self._url("probe")
        except ValueError as error:
            raise ConfigError(f"fleet.blobs = {address!r}: {error}", "fleet.blobs") from None

    async def size(self, key: str) -> int:
        """Bytes of a blob, by HEAD."""
        return await self._reader.size(self._url(key))

    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`, by a ranged GET."""
        return await self._reader.get(self._url(key), offset, nbytes)

    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        """Refused."""
        raise ConfigError(f"fleet.blobs = {self.address!r} is read-only; publish to the store behind it", "fleet.blobs")

    async def scan(self, folder: str) -> list[BlobInfo]:
        """Refused."""
        raise ConfigError(f"fleet.blobs = {self.address!r} cannot be listed", "fleet.blobs")

    async def delete(self, key: str) -> None:
        """Refused."""
        await self.put(key, b"")

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._reader.close()

    def _url(self, key: str) -> URL:
        return URL(f"{self.address}/{check_key(key)}")
