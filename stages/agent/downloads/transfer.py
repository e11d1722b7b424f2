"""Brings the pieces of one `.bin` into its part file: several sources and requests, each piece verified on arrival.

One loop starts requests and handles their results; only reading and writing happen elsewhere.  It ends when every piece
is present, or when no source can bring one of them.  Cancelled, it leaves the part file for a later continuation.

A piece that has been read is verified and written while the next one is on its way, so that a connection does not wait
for the disk.  A disk that is slower than the link bounds the requests (`MOST_STORING`).

Where other agents download the same file, each reads from the store what is its part first (`Sharing`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from pipeline.errors import StarlingError, StorageUnavailable
from shm.checkpoint import piece_checksum
from stages.agent.disk_threads import MODELS
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.concurrency import AdaptiveLimit
from stages.agent.downloads.part_file import PartFile
from stages.agent.downloads.pieces import PieceMap
from stages.agent.downloads.sources import LATE, LEAST_LATE_S, Source, SourceTable

log = logging.getLogger("starling.download")

PIECE_TIMEOUT_S = 300.0  # 8 MiB at 28 kB/s
MAX_CONNECTIONS = 16
PEER_CONNECTIONS = 8  # requests to other agents at once, besides those to stores
WINDOW = 64  # missing pieces that are looked at: the first ones
MOST_STORING = 2  # pieces in memory that are verified and written, besides as many as there may be requests
SHARING_POLL_S = 0.05  # while other agents may bring what is missing
MOST_AGE_S = 30.0  # of a request that has no answer yet: it counts as the time of an answer only so far
LOST_S = 10.0  # for which a download without any request waits for other agents, when no source has the next piece

Progress = Callable[[int, int], None]  # bytes present, bytes of the file
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]


class Sharing(Protocol):
    """The other agents that have the file, or download it, too."""

    def new_sources(self) -> Sequence[Source]:
        """Those that have been found since the last call."""

    def is_own(self, piece: int) -> bool:
        """Whether this download is the one to read the piece from a store."""

    def is_expected(self, piece: int, request_s: float) -> bool:
        """Whether another agent is about to have it. `request_s`: that a store takes for a piece; 0: unknown."""

    def is_hopeful(self) -> bool:
        """Whether another agent may get a piece that none has now, or is not yet known."""

    def drop(self, source: Source) -> None:
        """It is not asked any more."""


class Limits(NamedTuple):
    """Bounds of a transfer."""

    connections: int = MAX_CONNECTIONS
    piece_timeout_s: float = PIECE_TIMEOUT_S


class TransferReport(NamedTuple):
    """What a transfer has done."""

    received: int  # bytes, without those that were there
    rejected: int  # pieces that differed from their checksum
    by_source: dict[str, tuple[int, int]]


class _Read(NamedTuple):
    """A piece in memory, not yet verified."""

    piece: int
    source: Source
    seconds: float
    data: bytes


class _Result(NamedTuple):
    piece: int
    source: Source
    seconds: float
    nbytes: int
    error: StarlingError | None
    is_damaged: bool = False
    is_late: bool = False


class Transfer:
    """One transfer. `run` is called once."""

    def __init__(
        self,
        file: PartFile,
        checksums: list[int],
        sources: list[Source],
        bandwidth: Bandwidth,
        limits: Limits,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        jitter: Callable[[], float] = lambda: 0.5,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """`checksums`: XXH3-64 of each piece."""
        self._file = file
        self._checksums = checksums
        self._sources = SourceTable(sources, clock, jitter)
        self._jitter = jitter
        self._bandwidth = bandwidth
        self._limits = limits
        self._limit = AdaptiveLimit(limits.connections, clock)
        self._clock = clock
        self._sleep = sleep
        self._progress = progress
        self.sharing: Sharing | None = None  # set before `run`
        self._pieces = PieceMap(0)
        self._tasks: dict[asyncio.Task[_Read | _Result], tuple[int, Source]] = {}  # requests
        self._storing: dict[asyncio.Task[_Result], tuple[int, Source]] = {}  # pieces that have been read
        self._done = 0  # bytes present
        self._received = self._rejected = 0
        self._begun: dict[int, float] = {}  # by piece in flight: when it was first asked for
        self._late_at: float | None = None
        self._lost_at: float | None = None  # since when no source has the next piece, and there is no request

    @property
    def present(self) -> Collection[int]:
        """Pieces that are verified and written."""
        return self._pieces.present

    @property
    def claimed(self) -> Collection[int]:
        """Pieces that are being read from a store, and those that have been and are not yet present.

        May be called in another thread: each copy is made in one step.
        """
        begun = (*list(self._tasks.values()), *list(self._storing.values()))
        return {piece for piece, source in begun if not source.is_peer}

    async def run(self) -> TransferReport:
        """Raises the `StarlingError` of the source that failed last, `ResourceError` when the disk is full."""
        self._pieces = PieceMap(len(self._checksums), await self._find_present())
        self._progress(self._done, self._file.nbytes)
        try:
            while not self._pieces.is_complete:
                self._start_requests()
                if not (self._tasks or self._storing):  # every source pauses, or none has the next piece
                    self._check_lost()
                    await self._sleep(self._wait_s() or 0.0)
                    continue
                self._lost_at = None
                await self._one_result()
        finally:
            left: list[asyncio.Task[Any]] = [*self._tasks, *self._storing]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return TransferReport(self._received, self._rejected, self._sources.report())

    async def _find_present(self) -> set[int]:
        """The pieces that an earlier transfer has left. No progress: it would be the speed of the disk."""
        at, found = 0, set()
        while at < self._file.nbytes:
            piece, at = await MODELS.uninterrupted(self._file.next_present, at, self._checksums)
            if piece >= 0:
                found.add(piece)
                self._done += self._file.piece_range(piece)[1]
        return found

    def _start_requests(self) -> None:
        for found in self.sharing.new_sources() if self.sharing is not None else ():
            self._sources.add(found)
        # Requests to other agents have a number of their own: else the link to the store would stand still meanwhile.
        more = PEER_CONNECTIONS if self.sharing is not None else 0
        while len(self._tasks) < self._limit.value + more:
            if len(self._tasks) + len(self._storing) >= self._limit.value + more + MOST_STORING:
                return
            n_peer = sum(source.is_peer for _, source in self._tasks.values())
            may_store, may_peer = len(self._tasks) - n_peer < self._limit.value, n_peer < more
            piece, source = self._next(may_store, may_peer)
            if piece is None and (may_peer or not self._pieces.n_missing):
                piece, source = self._late()
            if piece is None or source is None:
                return
            self._pieces.begin(piece)
            self._sources.begin(source)
            self._begun.setdefault(piece, self._clock())
            self._tasks[asyncio.create_task(self._fetch(piece, source))] = piece, source

    def _next(self, may_store: bool = True, may_peer: bool = True) -> tuple[int | None, Source | None]:
        """A missing piece, and the source to ask, of those that may be asked.

        Another agent's part is read from a store last.
        """
        if not (may_store or may_peer):
            return None, None
        rest: list[tuple[int, Source]] = []
        request_s = self._store_request_s() if self.sharing is not None else 0.0
        for piece in self._pieces.missing(WINDOW if self.sharing is not None else 1):
            source = self._sources.choose(piece)
            if source is None or not (may_peer if source.is_peer else may_store):
                continue
            if self.sharing is None or source.is_peer or source.is_local:
                return piece, source
            if self.sharing.is_expected(piece, request_s):
                continue
            if self.sharing.is_own(piece):
                return piece, source
            rest.append((piece, source))
        if not rest:
            return None, None
        # The first ones are the next of those whose part they are, and agents without a part choose different ones.
        return rest[-1 - int(self._jitter() * ((len(rest) + 1) // 2))]

    def _store_request_s(self) -> float:
        """Seconds that a store takes for a piece, at least those of a request without an answer yet; 0: unknown."""
        now = self._clock()
        ages = [
            now - self._begun.get(piece, now)
            for piece, source in self._tasks.values()
            if not (source.is_peer or source.is_local)
        ]
        return max(self._sources.store_request_s, min(MOST_AGE_S, max(ages, default=0.0)))

    def _late(self) -> tuple[int | None, Source | None]:
        """A piece that takes too long, and another source for it. Otherwise sets `_late_at`.

        At the end any source will do, and before that another agent: its requests do not count as those of a store.
        """
        self._late_at = None
        if self._sources.n_usable < 2:
            return None, None
        for piece in self._pieces.repeatable():
            first = next((source for asked, source in self._tasks.values() if asked == piece), None)
            if first is None:  # it has been read
                continue
            other = self._sources.choose(piece, first)
            if other is None or first.is_local or self._sources.has_failed(other, piece):
                continue
            if self._pieces.n_missing and not other.is_peer:
                continue
            expected = self._sources.expected_s(other, self._file.piece_range(piece)[1])
            at = self._begun[piece] + max(LEAST_LATE_S, LATE * expected)
            if self._clock() >= at:
                return piece, other
            self._late_at = at if self._late_at is None else min(at, self._late_at)
        return None, None

    def _wait_s(self) -> float | None:
        """Seconds until a paused source is asked for the next piece, or a piece is late; None for neither."""
        if self.sharing is not None:
            return SHARING_POLL_S
        piece = self._pieces.first_missing()
        if piece is not None:
            return self._sources.next_ready_s(piece) or None
        return None if self._late_at is None else max(0.001, self._late_at - self._clock())

    def _check_lost(self) -> None:
        """Raise the last error of a store when no source has the next piece, and no agent brings it for `LOST_S`."""
        piece = self._pieces.first_missing()
        error = self._sources.lost(piece) if piece is not None else None
        if error is None:
            self._lost_at = None
            return
        if self._lost_at is None:
            self._lost_at = self._clock()
        if self.sharing is None or not self.sharing.is_hopeful() or self._clock() >= self._lost_at + LOST_S:
            raise error

    async def _one_result(self) -> None:
        waited_for: list[asyncio.Task[Any]] = [*self._tasks, *self._storing]
        # A paused source becomes ready while others still work.
        done, _ = await asyncio.wait(waited_for, timeout=self._wait_s(), return_when=asyncio.FIRST_COMPLETED)
        results: list[_Result] = []
        for task in done:
            if (stored := self._storing.get(task)) is not None:
                if stored[1].is_peer:
                    self._sources.ended(stored[1])
                results.append(task.result())
                continue
            piece, source = self._tasks[task]
            read = None if task.cancelled() else task.result()
            if isinstance(read, _Read):  # before it leaves `_tasks`: another thread may call `claimed`
                self._storing[asyncio.create_task(self._store(read))] = piece, source
            del self._tasks[task]
            if not (isinstance(read, _Read) and source.is_peer):  # its agent is asked for more when it is verified
                self._sources.ended(source)
            if read is None:  # its source was dropped, or another one was faster
                self._pieces.failed(piece)
                if piece not in self._pieces.in_flight:  # else another source has been asked for it, too
                    self._begun.pop(piece, None)
            elif isinstance(read, _Result):
                results.append(read)
        for result in results:
            self._settle(result)
        for task in done:  # pieces that are present now
            self._storing.pop(task, None)

    def _settle(self, result: _Result) -> None:
        piece, source, error = result.piece, result.source, result.error
        if piece not in self._pieces.in_flight or self._pieces.in_flight[piece] == 1:
            self._begun.pop(piece, None)
        if error is None:
            self._sources.succeeded(source, result.nbytes, result.seconds)
            for task, (asked, _) in self._tasks.items():
                if asked == piece:  # it was asked for twice
                    task.cancel()
            if self._pieces.arrived(piece):
                if not source.is_peer:
                    self._limit.arrived(result.nbytes)
                self._received += result.nbytes
                self._done += result.nbytes
                self._progress(self._done, self._file.nbytes)
            return
        is_needed = piece not in self._pieces.present
        self._pieces.failed(piece)
        if not is_needed:
            return
        try:
            self._note_failure(result, error)
        except StarlingError:  # no source has the piece
            if self.sharing is None:
                raise
        if source.is_peer and self._sources.is_dropped(source):
            self._drop(source, error)

    def _note_failure(self, result: _Result, error: StarlingError) -> None:
        piece, source = result.piece, result.source
        if result.is_damaged:
            self._rejected += 1
            self._sources.rejected(source, piece, error)
        elif result.is_late and source.is_peer:
            self._sources.drop(source, piece, error)
        else:
            if isinstance(error, StorageUnavailable) and not source.is_peer:
                self._limit.throttled()
            self._sources.failed(source, piece, error)

    def _drop(self, source: Source, error: StarlingError) -> None:
        """Ask an agent for nothing more, and take back what it was asked for."""
        log.warning("an agent is not asked for pieces any more", extra={"source": source.name, "reason": error.message})
        if self.sharing is not None:
            self.sharing.drop(source)
        for task, (_, asked) in self._tasks.items():
            if asked is source:
                task.cancel()

    async def _fetch(self, piece: int, source: Source) -> _Read | _Result:
        """Read one piece; the result is why it was not."""
        offset, nbytes = self._file.piece_range(piece)
        if wait := self._bandwidth.delay_s(nbytes):
            await self._sleep(wait)
        begun = self._clock()
        try:
            timeout_s = source.timeout_s or self._limits.piece_timeout_s
            async with asyncio.timeout(timeout_s):
                data = await source.read(offset, nbytes)
        except TimeoutError:
            slow = StorageUnavailable(f"{source.name}: piece {piece} took over {timeout_s:.0f} s")
            return _Result(piece, source, 0.0, nbytes, slow, is_late=True)
        except StarlingError as error:
            return _Result(piece, source, 0.0, nbytes, error)
        return _Read(piece, source, max(self._clock() - begun, 1e-6), data)

    async def _store(self, read: _Read) -> _Result:
        """Verify and write one piece. Raises only what ends the transfer: errors of the own disk."""
        piece, source, seconds, data = read
        offset, nbytes = self._file.piece_range(piece)
        if len(data) != nbytes or await asyncio.to_thread(piece_checksum, data) != self._checksums[piece]:
            damaged = StorageUnavailable(
                f"{source.name}: piece {piece} (bytes {offset}..{offset + nbytes}) differs from its checksum: what is "
                f"stored there is not what was published; publish the model again"
            )
            return _Result(piece, source, seconds, nbytes, damaged, is_damaged=True)
        if piece not in self._pieces.present:
            await MODELS.uninterrupted(self._file.write, piece, data)
        return _Result(piece, source, seconds, nbytes, None)
