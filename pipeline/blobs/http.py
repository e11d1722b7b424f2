"""Blobs of a web server, read by HTTP ranges: a mirror of a published folder, or a bucket that is public.

Read-only, and without listings: HTTP has none.  Every header that the server sends is checked against the request,
and no more bytes are accepted than were asked for.
"""

from __future__ import annotations

import datetime
import email.utils
import re
import time
from collections.abc import Callable

import aiohttp

from pipeline.blobs.interface import BlobInfo, BlobStore, Data, check_key, check_range, wrong_length
from pipeline.errors import ConfigError, NotFound, StarlingError, StorageUnavailable

CONNECT_S = 10.0
SILENCE_S = 30.0  # without a byte
CONNECTIONS = 64
REDIRECTS = 4
_MISSING = (404, 410)
_REFUSED = (400, 401, 403, 405, 407, 451)
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "starling"}  # a range of compressed bytes is of no use


class HttpStore(BlobStore):
    """The blobs below `address`, an http(s) URL."""

    can_list = False
    can_write = False

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        """`clock`: s since 1970, to read a `Retry-After` that is a date."""
        self.address = address.rstrip("/")
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def size(self, key: str) -> int:
        """Bytes of a blob, by HEAD."""
        url = self._url(key)
        try:
            async with self._open().head(url, max_redirects=REDIRECTS, allow_redirects=True) as response:
                if response.status != 200:
                    raise self._refusal(response)
                if (
                    response.content_length is None
                    or response.headers.get("Content-Encoding", "identity") != "identity"
                ):
                    raise ConfigError(f"{url}: the server gives no Content-Length; use another one", "fleet.blobs")
                return response.content_length
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(url, error) from None

    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`, by a ranged GET."""
        check_range(offset, nbytes)
        url = self._url(key)
        wanted = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        try:
            async with self._open().get(url, headers=wanted, max_redirects=REDIRECTS) as response:
                self._check_answer(response, offset, nbytes)
                data = await response.content.readexactly(nbytes)
                if await response.content.read(1):
                    response.close()
                    raise StorageUnavailable(f"{url}: more than the {nbytes:,} bytes that were asked for")
                return data
        except EOFError as error:  # asyncio.IncompleteReadError
            raise wrong_length(url, offset, nbytes, len(getattr(error, "partial", b""))) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(url, error) from None

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
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _url(self, key: str) -> str:
        return f"{self.address}/{check_key(key)}"

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                auto_decompress=False,
                trust_env=True,
            )
        return self._session

    def _check_answer(self, response: aiohttp.ClientResponse, offset: int, nbytes: int) -> None:
        """Raise unless the body that follows is the range."""
        length = response.content_length
        is_whole = response.status == 200 and offset == 0 and length == nbytes
        if response.status == 200 and not is_whole:
            response.close()  # the rest of the blob need not be received
            raise ConfigError(f"{response.url}: the server does not answer ranges; use another one", "fleet.blobs")
        if not is_whole and response.status != 206:
            raise self._refusal(response)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            response.close()
            raise ConfigError(f"{response.url}: the server compresses ranges; use another one", "fleet.blobs")
        found = None if is_whole else _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not is_whole and (found is None or (int(found[1]), int(found[2])) != (offset, offset + nbytes - 1)):
            response.close()
            given = response.headers.get("Content-Range", "none")[:80]
            raise StorageUnavailable(f"{response.url}: Content-Range is {given!r}, expected {nbytes:,} from {offset:,}")
        if length is not None and length != nbytes:
            response.close()
            raise wrong_length(str(response.url), offset, nbytes, length)

    def _refusal(self, response: aiohttp.ClientResponse) -> StarlingError:
        what = (
            f"{response.url.with_query(None).with_user(None)} answers {response.status} {response.reason or ''}".strip()
        )
        if response.status in _MISSING:
            return NotFound(what)
        if response.status in _REFUSED:
            return ConfigError(f"{what}; check fleet.blobs", "fleet.blobs")
        wait = retry_after_s(response.headers.get("Retry-After", ""), self._clock())
        return StorageUnavailable(what, retry_after_s=wait)

    @staticmethod
    def _lost(url: str, error: BaseException) -> StorageUnavailable:
        return StorageUnavailable(f"{url}: {str(error) or type(error).__name__}")


def retry_after_s(header: str, now: float) -> float:
    """Seconds of a `Retry-After` header (RFC 9110, 10.2.3): a number or a date; 0 for none and for nonsense."""
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        date = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp() - now)
