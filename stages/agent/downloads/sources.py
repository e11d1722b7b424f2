"""Where pieces come from, and which source the next piece is asked from.

A `Source` reads a range of the `.bin`.  `SourceTable` (pure) chooses: of the sources that have failed least often for
this piece, a local one, else the one whose next answer is expected first.  The expectation is the measured time per
byte times the requests that it would then serve; before the first measurement, a value for its kind.  A source that
fails pauses, with backoff; one that refuses (no such file, no permission) is not asked again.

Other agents are sources that may have some of the pieces only, and may be wrong, slow or dead.  One that has given
nothing yet gets a single request; the first damaged piece, the first that takes too long, and the second failure in a
row end its use.  They are preferred to a store that would answer somewhat earlier, because the store serves all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pipeline.blobs.interface import BlobStore
from pipeline.blobs.retry import delay_s
from pipeline.catalog.entry import Entry
from pipeline.errors import NotFound, StarlingError, StorageUnavailable
from shm.checkpoint import PIECE_BYTES
from stages.agent.disk_threads import MODELS

# Expected bytes/s before the first measurement.
LOCAL = 1e9
PEER = 2e8
REMOTE = 5e7
SMOOTHING = 0.3  # weight of the last measurement
MAX_FAILURES = 6  # of one piece, from one source
STORE_COST = 4.0  # an agent may take so many times as long as the store
PEER_REQUESTS = 4  # at once, to an agent that has given a piece
MAX_PEER_FAILURES = 2  # in a row
BUSY_S = 15.0  # for which an agent may answer that it is busy, and nothing else
# A piece is left to an agent that has all its requests, while it answers within so many times the expected time.
LATE = 3.0
LEAST_LATE_S = 0.5


class Source(Protocol):
    """One place that has the `.bin`."""

    name: str  # for messages
    expected_rate: float  # bytes/s
    is_local: bool  # costs no network: always asked first
    is_peer: bool  # another agent
    timeout_s: float  # of one piece; 0: that of the transfer

    def holds(self, piece: int) -> bool:
        """Whether it has the piece, as far as is known."""

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes of the `.bin`, not yet verified. Raises `StarlingError`."""


class StoreSource:
    """A published model in a blob store. `offset` and length must lie within one part, as those of a piece do."""

    is_local = is_peer = False
    timeout_s = 0.0

    def __init__(self, store: BlobStore, entry: Entry, expected_rate: float = REMOTE) -> None:
        self.name = store.address
        self.expected_rate = expected_rate
        self._store = store
        self._entry = entry

    def holds(self, piece: int) -> bool:
        """A store has all pieces."""
        return True

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes. Raises `StarlingError`."""
        part, at = divmod(offset, self._entry.part_bytes)
        return await self._store.get(self._entry.part_key(part), at, nbytes)


class FileSource:
    """A `.bin` on this machine, of which some pieces may be damaged."""

    expected_rate = LOCAL
    is_local = True
    is_peer = False
    timeout_s = 0.0

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def holds(self, piece: int) -> bool:
        """It is found out by reading."""
        return True

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes. Raises `NotFound`, `StorageUnavailable`."""
        try:
            data = await MODELS.run(self._read, offset, nbytes)
        except FileNotFoundError:
            raise NotFound(f"{self.name} does not exist") from None
        except OSError as error:
            raise StorageUnavailable(f"{self.name}: {error.strerror}") from None
        if len(data) != nbytes:
            raise StorageUnavailable(f"{self.name} ends before {offset + nbytes:,}")
        return data

    def _read(self, offset: int, nbytes: int) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)


@dataclass
class _State:
    """What is known of a source."""

    source: Source
    seconds_per_byte: float
    in_flight: int = 0
    failures: int = 0  # since its last success
    busy_since: float = 0.0  # of its requests: the last success, or the first request since it had none
    paused_until: float = 0.0
    refused_since: float | None = None  # an agent's first answer that it is busy, since its last piece
    refusal: StarlingError | None = None  # it is not asked again
    received: int = 0  # bytes
    rejected: int = 0  # pieces that differed from their checksum
    piece_failures: Counter[int] = field(default_factory=Counter)


class SourceTable:
    """The sources of one download."""

    def __init__(
        self, sources: list[Source], clock: Callable[[], float], jitter: Callable[[], float] = lambda: 0.5
    ) -> None:
        """`clock`: monotonic, s; `jitter`: [0, 1)."""
        self._clock = clock
        self._jitter = jitter
        self._states: list[_State] = []
        self._last_error: StarlingError | None = None  # of a source that is no agent
        self.store_request_s = 0.0  # that a store takes for one piece, smoothed; 0: unknown
        for source in sources:
            self.add(source)

    def add(self, source: Source) -> None:
        """Use another source from now on."""
        self._states.append(_State(source, 1.0 / source.expected_rate))

    def choose(self, piece: int, excluded: Source | None = None) -> Source | None:
        """The source to ask for a piece now; None while all pause, or the best one has all the requests it may have."""
        now = self._clock()
        ready = [state for state in self._eligible(piece) if state.paused_until <= now and state.source is not excluded]
        while ready:
            best = min(
                ready,
                key=lambda one: (
                    one.piece_failures[piece],
                    not one.source.is_local,
                    one.seconds_per_byte * (one.in_flight + 1) * (1.0 if one.source.is_peer else STORE_COST),
                ),
            )
            if not best.source.is_peer or best.in_flight < (PEER_REQUESTS if best.received else 1):
                return best.source
            if now < best.busy_since + max(LEAST_LATE_S, LATE * best.seconds_per_byte * PIECE_BYTES * best.in_flight):
                return None
            ready.remove(best)
        return None

    def has_failed(self, source: Source, piece: int) -> bool:
        """Whether a source has failed to bring a piece."""
        return self._of(source).piece_failures[piece] > 0

    def expected_s(self, source: Source, nbytes: int) -> float:
        """Seconds until the answer to another request."""
        state = self._of(source)
        return state.seconds_per_byte * (state.in_flight + 1) * nbytes

    def begin(self, source: Source) -> None:
        """A request starts."""
        state = self._of(source)
        if not state.in_flight:
            state.busy_since = self._clock()
        state.in_flight += 1

    def ended(self, source: Source) -> None:
        """A request has ended, with `succeeded`, `failed` or neither (it was cancelled)."""
        self._of(source).in_flight -= 1

    def succeeded(self, source: Source, nbytes: int, seconds: float) -> None:
        """A piece has arrived and has its checksum."""
        state = self._of(source)
        # The time is shared with the other requests to this source, as the next one's will be.
        measured = seconds / nbytes / max(1, state.in_flight)
        state.seconds_per_byte += SMOOTHING * (measured - state.seconds_per_byte)
        state.failures, state.paused_until, state.refused_since = 0, 0.0, None
        state.received += nbytes
        state.busy_since = self._clock()
        if not source.is_peer and not source.is_local:
            before = self.store_request_s or seconds
            self.store_request_s = before + SMOOTHING * (seconds - before)

    def failed(self, source: Source, piece: int, error: StarlingError) -> None:
        """A request has failed. Raises the error once no source is left, or the piece has failed too often."""
        state = self._of(source)
        if source.is_peer and error.retry_after_s:  # it is busy, which is no failure
            now = self._clock()
            state.paused_until = now + delay_s(1, error.retry_after_s, self._jitter())
            state.refused_since = now if state.refused_since is None else state.refused_since
            if now >= state.refused_since + BUSY_S:
                self.drop(source, piece, error)
            return
        self._note(source, error)
        state.piece_failures[piece] += 1
        now = self._clock()
        if now >= state.paused_until:  # requests that fail together count once
            state.failures += 1
            state.paused_until = now + delay_s(state.failures, error.retry_after_s, self._jitter())
        if not isinstance(error, StorageUnavailable) or (source.is_peer and state.failures >= MAX_PEER_FAILURES):
            state.refusal = error
        self._give_up(piece, error)

    def rejected(self, source: Source, piece: int, error: StarlingError) -> None:
        """A piece differed from its checksum: other pieces of this source may be right. Raises like `failed`."""
        state = self._of(source)
        self._note(source, error)
        state.rejected += 1
        state.piece_failures[piece] += 1
        if source.is_peer:
            state.refusal = error
        self._give_up(piece, error)

    def drop(self, source: Source, piece: int, error: StarlingError) -> None:
        """A source is not used any more. Raises like `failed`."""
        self._of(source).refusal = error
        self._give_up(piece, error)

    def is_dropped(self, source: Source) -> bool:
        """Whether a source is not asked any more."""
        return self._of(source).refusal is not None

    def lost(self, piece: int) -> StarlingError | None:
        """The last error of a store, if no source has a piece or can be asked for it any more."""
        if self._eligible(piece):
            return None
        return self._last_error or StorageUnavailable(f"piece {piece}: no source has it; set fleet.blobs")

    def next_ready_s(self, piece: int) -> float:
        """Seconds until a source may be asked for a piece; 0: now."""
        now = self._clock()
        return min((max(0.0, state.paused_until - now) for state in self._eligible(piece)), default=0.0)

    @property
    def n_usable(self) -> int:
        """Sources that have not refused."""
        return len(self._usable())

    def report(self) -> dict[str, tuple[int, int]]:
        """Bytes received and pieces rejected, by the name of the source."""
        return {state.source.name: (state.received, state.rejected) for state in self._states}

    def _note(self, source: Source, error: StarlingError) -> None:
        if not source.is_peer:
            self._last_error = error

    def _give_up(self, piece: int, error: StarlingError) -> None:
        if not self._eligible(piece):
            raise error

    def _eligible(self, piece: int) -> list[_State]:
        return [
            state
            for state in self._usable()
            if state.piece_failures[piece] < MAX_FAILURES and state.source.holds(piece)
        ]

    def _usable(self) -> list[_State]:
        return [state for state in self._states if state.refusal is None]

    def _of(self, source: Source) -> _State:
        return next(state for state in self._states if state.source is source)
