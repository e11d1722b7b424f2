"""Where pieces come from, and which source the next piece is asked from.

A `Source` reads a range of the `.bin`.  `SourceTable` (pure) chooses: of the sources that have failed least often for
this piece, a local one, else the one whose next answer is expected first.  The expectation is the measured time per
byte times the requests that it would then serve; before the first measurement, a value for its kind.  A source that
fails pauses, with backoff; one that refuses (no such file, no permission) is not asked again.
"""

from __future__ import annotations

import asyncio
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

# Expected bytes/s before the first measurement.
LOCAL = 1e9
PEER = 2e8
REMOTE = 5e7
SMOOTHING = 0.3  # weight of the last measurement
MAX_FAILURES = 6  # of one piece, from one source


class Source(Protocol):
    """One place that has the `.bin`."""

    name: str  # for messages
    expected_rate: float  # bytes/s
    is_local: bool  # costs no network: always asked first

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes of the `.bin`, not yet verified. Raises `StarlingError`."""


class StoreSource:
    """A published model in a blob store. `offset` and length must lie within one part, as those of a piece do."""

    is_local = False

    def __init__(self, store: BlobStore, entry: Entry, expected_rate: float = REMOTE) -> None:
        self.name = store.address
        self.expected_rate = expected_rate
        self._store = store
        self._entry = entry

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes. Raises `StarlingError`."""
        part, at = divmod(offset, self._entry.part_bytes)
        return await self._store.get(self._entry.part_key(part), at, nbytes)


class FileSource:
    """A `.bin` on this machine, of which some pieces may be damaged."""

    expected_rate = LOCAL
    is_local = True

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes. Raises `NotFound`, `StorageUnavailable`."""
        try:
            data = await asyncio.to_thread(self._read, offset, nbytes)
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
    paused_until: float = 0.0
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
        self._states = [_State(source, 1.0 / source.expected_rate) for source in sources]

    def choose(self, piece: int, excluded: Source | None = None) -> Source | None:
        """The source to ask for a piece now; None while all pause."""
        now = self._clock()
        ready = [state for state in self._eligible(piece) if state.paused_until <= now and state.source is not excluded]
        if not ready:
            return None
        return min(
            ready,
            key=lambda one: (
                one.piece_failures[piece],
                not one.source.is_local,
                one.seconds_per_byte * (one.in_flight + 1),
            ),
        ).source

    def has_failed(self, source: Source, piece: int) -> bool:
        """Whether a source has failed to bring a piece."""
        return self._of(source).piece_failures[piece] > 0

    def expected_s(self, source: Source, nbytes: int) -> float:
        """Seconds until the answer to another request."""
        state = self._of(source)
        return state.seconds_per_byte * (state.in_flight + 1) * nbytes

    def begin(self, source: Source) -> None:
        """A request starts."""
        self._of(source).in_flight += 1

    def ended(self, source: Source) -> None:
        """A request has ended, with `succeeded`, `failed` or neither (it was cancelled)."""
        self._of(source).in_flight -= 1

    def succeeded(self, source: Source, nbytes: int, seconds: float) -> None:
        """A piece has arrived and has its checksum."""
        state = self._of(source)
        # The time is shared with the other requests to this source, as the next one's will be.
        measured = seconds / nbytes / max(1, state.in_flight)
        state.seconds_per_byte += SMOOTHING * (measured - state.seconds_per_byte)
        state.failures, state.paused_until = 0, 0.0
        state.received += nbytes

    def failed(self, source: Source, piece: int, error: StarlingError) -> None:
        """A request has failed. Raises the error once no source is left, or the piece has failed too often."""
        state = self._of(source)
        state.piece_failures[piece] += 1
        if isinstance(error, StorageUnavailable):
            now = self._clock()
            if now >= state.paused_until:  # requests that fail together count once
                state.failures += 1
                state.paused_until = now + delay_s(state.failures, error.retry_after_s, self._jitter())
        else:
            state.refusal = error
        self._give_up(piece, error)

    def rejected(self, source: Source, piece: int, error: StarlingError) -> None:
        """A piece differed from its checksum: other pieces of this source may be right. Raises like `failed`."""
        state = self._of(source)
        state.rejected += 1
        state.piece_failures[piece] += 1
        self._give_up(piece, error)

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

    def _give_up(self, piece: int, error: StarlingError) -> None:
        if not self._eligible(piece):
            raise error

    def _eligible(self, piece: int) -> list[_State]:
        return [state for state in self._usable() if state.piece_failures[piece] < MAX_FAILURES]

    def _usable(self) -> list[_State]:
        return [state for state in self._states if state.refusal is None]

    def _of(self, source: Source) -> _State:
        return next(state for state in self._states if state.source is source)
