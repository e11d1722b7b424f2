"""Ranges of blobs by HTTP: a web server's, or those behind signed URLs.

Every header that the server sends is checked against the request, and no more bytes are accepted than were asked for.
The query of a URL may be a secret (that of a signed URL, also of one that a server redirects to): no error contains it.
"""

from __future__ import annotations

import datetime
import email.utils
import re
import time
from collections.abc import Callable

import aiohttp
from yarl import URL

from pipeline.blobs.interface import check_range, wrong_length
from pipeline.errors import ConfigError, NotFound, StarlingError, StorageUnavailable

CONNECT_S = 10.0
SILENCE_S = 30.0  # without a byte
CONNECTIONS = 64
_MISSING = (404, 410)
_REFUSED = (400, 401, 403, 405, 407, 451)
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "starling"}  # a range of compressed bytes is of no use


class UrlRefused(ConfigError):
    """The server refuses the request itself: its credentials, its method, or a signature that has expired."""


class RangeReader:
    """Connections of one store. Used in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time, redirects: int = 0, *, is_signed: bool = False) -> None:
        """`clock`: s since 1970, to read a `Retry-After` that is a date. `redirects`: that are followed.

        is_signed: the URLs carry their credentials; then those that `.netrc` has for a host are not sent.
        """
        self._clock = clock
        self._redirects = redirects
        self._is_signed = is_signed
        self._session: aiohttp.ClientSession | None = None

    async def size(self, url: URL) -> int:
        """Bytes of a blob, by HEAD. Raises `StarlingError`."""
        shown = shown_url(url)
        try:
            async with self._open().head(
                url, max_redirects=self._redirects, allow_redirects=self._redirects > 0
            ) as response:
                if response.status != 200:
                    raise self._refusal(response)
                if (
                    response.content_length is None
                    or response.headers.get("Content-Encoding", "identity") != "identity"
                ):
                    raise ConfigError(f"{shown}: the server gives no Content-Length; use another one", "fleet.blobs")
                return response.content_length
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _lost(shown, error) from None

    async def get(self, url: URL, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`. Raises `UrlRefused`, other `StarlingError`."""
        check_range(offset, nbytes)
        shown = shown_url(url)
        wanted = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        try:
            async with self._open().get(
                url, headers=wanted, max_redirects=self._redirects, allow_redirects=self._redirects > 0
            ) as response:
                self._check_answer(response, offset, nbytes)
                data = await response.content.readexactly(nbytes)
                if await response.content.read(1):
                    response.close()
                    raise StorageUnavailable(f"{shown}: more than the {nbytes:,} bytes that were asked for")
                return data
        except EOFError as error:  # asyncio.IncompleteReadError
            raise wrong_length(shown, offset, nbytes, len(getattr(error, "partial", b""))) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _lost(shown, error) from None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                auto_decompress=False,
                trust_env=True,  # proxies, and `.netrc`
                middlewares=(_without_credentials,) if self._is_signed else (),
            )
        return self._session

    def _check_answer(self, response: aiohttp.ClientResponse, offset: int, nbytes: int) -> None:
        """Raise unless the body that follows is the range."""
        length, shown = response.content_length, shown_url(response.url)
        is_whole = response.status == 200 and offset == 0 and length == nbytes
        if response.status == 200 and not is_whole:
            response.close()  # the rest of the blob need not be received
            raise ConfigError(f"{shown}: the server does not answer ranges; use another one", "fleet.blobs")
        if not is_whole and response.status != 206:
            raise self._refusal(response)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            response.close()
            raise ConfigError(f"{shown}: the server compresses ranges; use another one", "fleet.blobs")
        found = None if is_whole else _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not is_whole and (found is None or (int(found[1]), int(found[2])) != (offset, offset + nbytes - 1)):
            response.close()
            raise StorageUnavailable(f"{shown}: the Content-Range is not that of {nbytes:,} bytes from {offset:,}")
        if length is not None and length != nbytes:
            response.close()
            raise wrong_length(shown, offset, nbytes, length)

    def _refusal(self, response: aiohttp.ClientResponse) -> StarlingError:
        what = f"{shown_url(response.url)} answers {response.status}"
        if response.status in _MISSING:
            return NotFound(what)
        if response.status in _REFUSED:
            return UrlRefused(f"{what}; check fleet.blobs", "fleet.blobs")
        wait = retry_after_s(response.headers.get("Retry-After", ""), self._clock())
        return StorageUnavailable(what, retry_after_s=wait)


async def _without_credentials(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A store refuses a request that is authenticated twice. Those for a proxy are left."""
    request.headers.pop("Authorization", None)
    return await send(request)


def shown_url(url: URL) -> str:
    """A URL for messages: without its query, user and password."""
    return str(url.with_query(None).with_fragment(None).with_user(None))


def _lost(shown: str, error: BaseException) -> StorageUnavailable:
    # An error of the system names host and port; the text of others may contain the whole URL, or what a server sent.
    is_of_system = isinstance(error, OSError) and error.errno is not None
    return StorageUnavailable(f"{shown}: {str(error) if is_of_system else type(error).__name__}")


def retry_after_s(header: str, now: float) -> float:
    """Seconds of a `Retry-After` header (RFC 9110, 10.2.3): a number or a date; 0 for none and for nonsense."""
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        date = email.utils.parsedate_to_datetime(header)
    except (ValueError, OverflowError):  # of a year or zone that no date can have
        return 0.0
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp() - now)
