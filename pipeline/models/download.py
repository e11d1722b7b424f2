"""Downloads one file over HTTP: several ranges at a time, resumed after any interruption. Knows nothing of models.

    GET Range: bytes=0-...   206 and a strong validator:  pieces of `PIECE_BYTES`, `CONNECTIONS` at a time, each with
                             If-Range, written to their place in PART; PART.json names the complete ones, until
                             the caller has placed PART
                             200, or no validator:        one stream, which cannot be resumed
    SHA-256                  follows the pieces in order while the next ones arrive

A validator is a strong entity tag or a date.  A file that changes between two ranges is noticed by it (and by its
total length), and the download starts again.  Bytes that the server sends beyond the range are not read.  Where
redirects led is remembered: later pieces come from there, until that address fails or has another file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pipeline.errors import ConfigError, ModelUnavailable, ResourceError
from pipeline.files import replace_file, write_all
from pipeline.models import addresses
from pipeline.models.arriving import ArrivingFile, Reader
from pipeline.models.sources import shown
from pipeline.threads import uninterrupted
from shm.decoding import DECODE_ERRORS

if TYPE_CHECKING:
    import aiohttp

CONNECTIONS = 4
PIECE_BYTES = 8 << 20  # of a range; lost at most, per connection, when the process is killed
CHUNK_BYTES = 1 << 18  # written at a time
ATTEMPTS = 6  # at one piece without receiving a byte of it
CHANGES = 3  # of the file during the download, until it is given up
REDIRECTS = 10
TIMEOUT_S = 30.0  # without data, and until an answer begins
SLOW_S = 60.0  # in which a connection receives at least `SLOW_BYTES`; otherwise the attempt fails
SLOW_BYTES = 1 << 14
BACKOFF_S = 0.5  # before the second attempt; doubles
MAX_WAIT_S = 30.0  # of a Retry-After
_REFUSED = (400, 401, 403, 404, 405, 410, 451)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Progress = Callable[[str, int, int], None]  # (what, done, total) in bytes; total 0: unknown


def no_progress(what: str, done: int, total: int) -> None:
    """A `progress` that shows nothing."""


def allow_all(url: str) -> None:
    """An `allow` that refuses no address."""


def no_headers(url: str) -> dict[str, str]:
    """A `headers_of` that adds none."""
    return {}


class State(msgspec.Struct):
    """PART.json: what a partial file is part of, and which of its pieces are complete."""

    validator: str
    total: int
    piece_bytes: int
    done: list[int]


class Identity(NamedTuple):
    """What all ranges must have in common."""

    validator: str
    total: int


class _Changed(Exception):
    """The server has another file now."""


class _NoRanges(Exception):
    """The server sends the whole file, or gives nothing by which ranges can be joined."""


class _Failed(Exception):
    """An attempt failed, and another one may succeed."""

    def __init__(self, reason: str, wait_s: float = 0.0, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.wait_s, self.is_slow = wait_s, is_slow  # slow: it counts, though it received bytes


def download(
    url: str,
    part: Path,
    progress: Progress,
    subject: str,
    allow: Callable[[str], None] = allow_all,
    connections: int = CONNECTIONS,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    reader: Reader | None = None,
    headers_of: Callable[[str], dict[str, str]] = no_headers,
    first_attempts: int = ATTEMPTS,
) -> str:
    """Download `url` into `part`, which keeps the received ranges when this raises; the file's SHA-256, hex.

    Call `discard(part)` when the file has been placed: until then another download of it has all bytes.
    `reader` gets the file while it arrives, if it arrives in ranges; the caller reports the end to it. `allow(url)`
    raises for an address that must not be fetched, redirects included. `headers_of(url)`: further headers of a request
    to that address, for example a token that no other host gets. `first_attempts`: at the first answer; each piece has
    `ATTEMPTS`.  Raises `ConfigError` (the server refuses or lacks the file), `ModelUnavailable` (network, 5xx,
    connection lost), `ResourceError` (not enough space).  Messages begin with `subject`.
    """
    return asyncio.run(
        _Download(url, part, progress, subject, allow, connections, pause, reader, headers_of, first_attempts).run()
    )


def discard(part: Path) -> None:
    """Remove what a download has left: its file, unless that was moved, and the list of complete pieces."""
    part.unlink(missing_ok=True)
    _state_file(part).unlink(missing_ok=True)


def _state_file(part: Path) -> Path:
    return part.with_name(part.name + ".json")


class _Download:
    def __init__(
        self,
        url: str,
        part: Path,
        progress: Progress,
        subject: str,
        allow: Callable[[str], None],
        connections: int,
        pause: Callable[[float], Awaitable[None]],
        reader: Reader | None,
        headers_of: Callable[[str], dict[str, str]],
        first_attempts: int,
    ) -> None:
        self._first_attempts = first_attempts
        self._reader = reader
        self._headers_of = headers_of
        self._url = url
        self._location = ""  # where redirects led last; "": ask the first address
        self._part = part
        self._state_file = _state_file(part)
        self._progress = progress
        self._subject = subject = subject.replace(url, shown(url))
        self._named = shown(url) if subject == shown(url) else f"{subject}: {shown(url)}"
        self._allow = allow
        self._connections = connections
        self._pause = pause
        self._received = 0  # bytes of this file in `part`, incomplete pieces included

    async def run(self) -> str:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
        headers = {"User-Agent": "starling", "Accept-Encoding": "identity"}
        try:
            async with aiohttp.ClientSession(
                timeout=timeout, headers=headers, trust_env=True, middlewares=(self._add_headers,)
            ) as session:
                for _ in range(CHANGES):
                    try:
                        return await self._whole_file(session)
                    except _Changed:
                        self._location = ""
                        discard(self._part)
                raise ModelUnavailable(f"{self._named} changed {CHANGES} times while it was downloaded")
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ConfigError(
                f"{self._subject}: {shown(self._url)!r} is not an address, or leads to none ({type(error).__name__})"
            ) from None

    async def _add_headers(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """They replace what `.netrc` has for the host."""
        request.headers.update(self._headers_of(str(request.url)))
        return await send(request)

    async def _whole_file(self, session: aiohttp.ClientSession) -> str:
        state = self._read_state()
        try:
            identity = await self._with_attempts(lambda: self._identify(session, state), self._first_attempts)
        except _NoRanges:
            discard(self._part)
            return await self._one_stream(session)
        if state is None or identity != Identity(state.validator, state.total):
            discard(self._part)
            state = State(identity.validator, identity.total, PIECE_BYTES, [])
        return await self._pieces(session, state)

    def _read_state(self) -> State | None:
        """The state of an earlier attempt; None if there is none that can be continued."""
        try:
            state = msgspec.json.decode(self._state_file.read_bytes(), type=State)
            size = self._part.stat().st_size
        except (OSError, *DECODE_ERRORS):
            return None
        last = max(state.done, default=-1)
        is_sound = state.piece_bytes == PIECE_BYTES and state.total > 0 and min(state.done, default=0) >= 0
        return state if is_sound and last * PIECE_BYTES < state.total <= max(size, state.total) else None

    # -------------------------------------------------------------- requests

    async def _identify(self, session: aiohttp.ClientSession, state: State | None) -> Identity:
        """Validator and total length. Raises `_NoRanges`."""
        async with self._get(session, 0, 0) as response:
            if response.status == 200:
                raise _NoRanges
            validator = _validator(response.headers)
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not validator or not found or int(found[1]) != 0:
                raise _NoRanges
            return Identity(validator, int(found[3]))

    @contextlib.asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, begin: int, end: int, state: State | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of 200 or 206 to a request for the bytes [begin, end], after redirects. Raises `_Failed`.

        `state`: what the bytes are part of.
        """
        import aiohttp

        headers = {"Range": f"bytes={begin}-{end}"} if end >= 0 else {}
        if state is not None:
            headers["If-Range"] = state.validator
        remembered = self._location
        url = remembered or self._url
        try:
            for _ in range(REDIRECTS):
                self._allow(url)
                sent, proxy = addresses.as_sent(url, self._url), addresses.proxy_of(url, self._subject)
                request = session.get(sent, headers=headers, allow_redirects=False, proxy=proxy)
                async with asyncio.timeout(TIMEOUT_S) as limit, request as response:
                    limit.reschedule(None)  # it has begun
                    if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                        url = addresses.redirected(url, response.headers["Location"], self._named)
                        continue
                    if response.status in (200, 206):
                        if remembered and state is not None and not _is_of(response, state):
                            raise _Failed(f"{shown(url)} has another file")  # the first address decides
                        self._location = url if url != self._url else ""
                        yield response
                        return
                    if remembered and response.status in _REFUSED:  # perhaps its signature has expired
                        raise _Failed(f"{shown(url)} answers {response.status} {response.reason}")
                    self._refuse(url, response, begin)
            raise ConfigError(f"{self._named} redirects more than {REDIRECTS} times")
        except _Failed:
            self._location = ""
            raise
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._location = ""
            raise _Failed(addresses.reason(error, TIMEOUT_S)) from None

    def _refuse(self, url: str, response: aiohttp.ClientResponse, begin: int) -> None:
        reason = f"{self._subject}: {shown(url)} answers {response.status} {response.reason}"
        if response.status == 416:
            reason = reason.removeprefix(f"{self._subject}: ")
            raise _Failed(f"{reason} to a request for bytes from {begin:,}: the file is shorter than was announced")
        if response.status in _REFUSED:
            raise ConfigError(reason)
        wait = response.headers.get("Retry-After", "")
        raise _Failed(
            reason.removeprefix(f"{self._subject}: "), min(float(wait), MAX_WAIT_S) if wait.isdecimal() else 0
        )

    async def _with_attempts(
        self,
        attempt: Callable[[], Awaitable[Any]],
        attempts: int = ATTEMPTS,
        remedy: str = "the received part is kept, try again",
    ) -> Any:
        """The result of `attempt`, repeated after a failure. An attempt that received bytes is not counted."""
        failures = 0
        while True:
            received = self._received
            try:
                return await attempt()
            except _Failed as failed:
                failures = 1 if self._received > received and not failed.is_slow else failures + 1
                if failures >= attempts:
                    raise ModelUnavailable(f"{self._named} could not be downloaded ({failed}); {remedy}") from None
                await self._pause(max(failed.wait_s, BACKOFF_S * 2 ** (failures - 1)))
            except OSError as error:
                raise ResourceError(
                    f"{self._subject}: {self._part.parent}: {error.strerror}; free space there"
                ) from None

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if needed > free:
            raise ResourceError(
                f"{self._subject}: needs {needed:,} bytes in {self._part.parent}, which has {free:,} free; free some "
                f"or move STARLING_HOME"
            )

    # -------------------------------------------------------------- ranges

    async def _pieces(self, session: aiohttp.ClientSession, state: State) -> str:
        """Fetch the pieces that are missing; the digest of the file. Raises `_Changed`."""
        total = state.total
        count = -(-total // PIECE_BYTES)
        missing = [piece for piece in range(count) if piece not in set(state.done)]
        have = total - sum(_length(piece, total) for piece in missing)
        self._check_space(sum(_length(piece, total) for piece in missing))
        self._received = have
        arriving = ArrivingFile(self._part, total, PIECE_BYTES, set(range(count)) - set(missing))
        with contextlib.suppress(OSError):
            self._part.chmod(0o600)  # a complete one may have been interrupted as it was placed
        fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size != total:
                os.ftruncate(fd, total)
            complete = [asyncio.Event() for _ in range(count)]
            for piece in set(range(count)) - set(missing):
                complete[piece].set()
            if self._reader is not None:
                self._reader.begin(arriving)
            waiting = iter(missing)

            async def work() -> None:
                for piece in waiting:  # shared: each piece is taken once, in order
                    await self._piece(session, fd, piece, state)
                    complete[piece].set()
                    arriving.add(piece)

            tasks = [asyncio.create_task(work()) for _ in range(min(self._connections, len(missing)))]
            hashing = asyncio.create_task(_hash(fd, total, complete))
            try:
                for done in asyncio.as_completed([*tasks, hashing]):
                    await done
            except BaseException:
                arriving.abandon()
                raise
            finally:
                for task in (*tasks, hashing):
                    task.cancel()
                await asyncio.gather(*tasks, hashing, return_exceptions=True)
        except OSError as error:
            raise ResourceError(f"{self._subject}: {self._part}: {error.strerror}; free space there") from None
        finally:
            os.close(fd)
        return hashing.result()

    async def _piece(self, session: aiohttp.ClientSession, fd: int, piece: int, state: State) -> None:
        begin, at = piece * PIECE_BYTES, piece * PIECE_BYTES
        end = begin + _length(piece, state.total)

        async def attempt() -> None:
            nonlocal at
            async with self._get(session, at, end - 1, state) as response:
                if not _is_of(response, state):
                    raise _Changed
                found = _CONTENT_RANGE.fullmatch(response.headers["Content-Range"])
                if not found or int(found[1]) != at:
                    raise _Failed(f"the server sent {response.headers['Content-Range']!r} for a request from {at:,}")
                pace = _Pace()
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    data = chunk[: end - at]
                    self._write(fd, data, at)
                    at += len(data)
                    self._received += len(data)
                    self._progress("download", self._received, state.total)
                    if at == end:
                        break
                    pace.check(len(data))
            if at < end:
                raise _Failed(f"connection lost after {self._received:,} of {state.total:,} bytes")
            await uninterrupted(os.fdatasync, fd)  # what is recorded as done outlives a power failure

        await self._with_attempts(attempt)
        state.done.append(piece)
        replace_file(self._state_file, msgspec.json.encode(state))

    def _write(self, fd: int, data: bytes, at: int) -> None:
        try:
            write_all(fd, data, at)
        except OSError as error:
            if self._reader is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._reader.close()  # what it has made of the file so far takes space that the file needs
            self._reader = None
            write_all(fd, data, at)

    # -------------------------------------------------------------- without ranges

    async def _one_stream(self, session: aiohttp.ClientSession) -> str:
        digest = hashlib.sha256()

        async def attempt() -> str:
            nonlocal digest
            digest, done = hashlib.sha256(), 0
            async with self._get(session, 0, -1) as response:
                total = response.content_length or 0
                self._check_space(total)
                pace = _Pace()
                with self._part.open("wb") as out:
                    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                        out.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        self._progress("download", done, total)
                        if done != total:
                            pace.check(len(chunk))
                if total and done != total:
                    raise _Failed(f"connection lost after {done:,} of {total:,} bytes")
            return digest.hexdigest()

        remedy = "the server sends no ranges, so that another attempt begins anew"
        result = await self._with_attempts(attempt, remedy=remedy)
        return str(result)


# ------------------------------------------------------------------ parts


class _Pace:
    """How fast one answer arrives."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._since, self._received = self._clock(), 0

    def check(self, nbytes: int) -> None:
        """So many bytes have arrived. Raises `_Failed` if the server hardly sends anything."""
        self._received += nbytes
        if (now := self._clock()) - self._since >= SLOW_S:
            if self._received < SLOW_BYTES:
                raise _Failed(f"only {self._received:,} bytes in {now - self._since:.3g} s", is_slow=True)
            self._since, self._received = now, 0


async def _hash(fd: int, total: int, complete: list[asyncio.Event]) -> str:
    """SHA-256 of the file, piece by piece as they become complete."""
    digest = hashlib.sha256()
    for piece, event in enumerate(complete):
        await event.wait()
        data = await uninterrupted(os.pread, fd, _length(piece, total), piece * PIECE_BYTES)
        await asyncio.to_thread(digest.update, data)
    return digest.hexdigest()


def _length(piece: int, total: int) -> int:
    return min(PIECE_BYTES, total - piece * PIECE_BYTES)


def _is_of(response: aiohttp.ClientResponse, state: State) -> bool:
    """Whether the response has a part of the file that the download has begun with."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return (
        response.status == 206
        and found is not None
        and int(found[3]) == state.total
        and _validator(response.headers) in ("", state.validator)
    )


def _validator(headers: Any) -> str:
    """By which two responses are known to be of the same bytes. A weak tag does not guarantee that."""
    tag = headers.get("ETag", "")
    if tag.startswith("W/"):
        return ""
    return str(tag or headers.get("Last-Modified", ""))
