"""Answers of ended requests that clients may still read, bounded in bytes, in number and in time.

When it is full, the tenant that holds most loses its oldest answer: no tenant can drive out those of the others.

A request with its sequences, tokens and logprobs (hundreds of bytes for each token) becomes one msgpack record,
without what no reader can ask for: the prompts, and tokens past a stop string. A reader gets a `RequestState` that
is restored from the record and gives the same bytes; concurrent readers share it. The clock is injected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from pipeline.errors import StarlingError
from stages.gateway.requests.journal import KEEP_S, MAX_ENDED
from stages.gateway.requests.output import SequenceOutput, output_of, restore_output
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.requests.state import Outcome, RequestState

MAX_BYTES = 16 << 20  # all records together
ENTRY_BYTES = 512  # estimated overhead of an entry beside its record


class _EndedRequest(msgspec.Struct, array_like=True, gc=False):
    """A `RequestState` that has ended."""

    spec: RequestSpec  # without prompts
    started_at: float
    response_cache: str
    error: tuple[str, str, str, int, float] | None  # code, message, param, status, retry_after_s
    outputs: list[SequenceOutput]
    is_started: bool = False  # it had left the queue: a stream had begun


_decode = msgspec.msgpack.Decoder(_EndedRequest).decode


class _Entry(NamedTuple):
    record: bytes
    until: float
    tenant: str

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.record) + ENTRY_BYTES


class ReplayBuffer:
    """One per gateway. `clock` is monotonic, in s."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENDED) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.bytes = 0
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._pinned: dict[str, bytes] = {}  # records of answers that are kept for an idempotency key
        self._accounted: set[str] = set()  # ids of these: delivered whole, or their length was given
        self._being_read: WeakValueDictionary[str, RequestState] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._entries) + len(self._pinned)

    def put(self, request: RequestState, pin: Callable[[int], bool] = lambda size: False) -> bool:
        """Store a request that has ended. False: it is larger than the buffer, or than half of it and would take the
        place of other tenants' answers.

        If `pin` is true of its size in bytes it stays until `drop`, and does not count against the bounds.
        """
        self.drop(request.id)
        entry = _Entry(to_record(request), self._clock() + KEEP_S, request.spec.tenant)
        if pin(entry.size):
            self._pinned[request.id] = entry.record
            return True
        others = sum(one.size for one in self._entries.values() if one.tenant != entry.tenant)
        if entry.size > max(self.max_bytes - others, self.max_bytes // 2):
            return False
        while len(self._entries) >= self.max_entries:
            self._drop_of_largest(entry, lambda one: 1)
        while self.bytes + entry.size > self.max_bytes:
            self._drop_of_largest(entry, lambda one: one.size)
        self._entries[request.id] = entry
        self.bytes += entry.size
        return True

    def _drop_of_largest(self, new: _Entry, weight: Callable[[_Entry], int]) -> None:
        """Drop the oldest answer of the tenant that would hold most, `new` included."""
        held: Counter[str] = Counter()
        for one in (*self._entries.values(), new):
            held[one.tenant] += weight(one)
        owners = {one.tenant for one in self._entries.values()}
        largest = max(owners, key=lambda tenant: held[tenant])
        self.drop(next(name for name, one in self._entries.items() if one.tenant == largest))

    def find(self, request_id: str) -> RequestState | None:
        """The request, restored for a reader."""
        entry = self._entries.get(request_id)
        record = entry.record if entry is not None else self._pinned.get(request_id)
        if record is None:
            return None
        request = self._being_read.get(request_id)
        if request is None:
            request = self._being_read[request_id] = from_record(record)
        return request

    def account(self, request_id: str) -> bool:
        """Note that an answer was delivered whole, or its length given to an orchestrator. Whether it is the first."""
        is_first = request_id not in self._accounted and (request_id in self._entries or request_id in self._pinned)
        if is_first:
            self._accounted.add(request_id)
        return is_first

    def expire(self) -> None:
        """Drop entries older than `KEEP_S`."""
        now = self._clock()
        while self._entries and now >= next(iter(self._entries.values())).until:
            self.drop(next(iter(self._entries)))

    def drop(self, request_id: str) -> None:
        """Remove an answer. Does nothing if there is none."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.bytes -= entry.size
        self._pinned.pop(request_id, None)
        self._accounted.discard(request_id)
        self._being_read.pop(request_id, None)


def to_record(request: RequestState) -> bytes:
    """The record of a request that has finished or failed."""
    error = request.error
    ended = _EndedRequest(
        request.spec.without_prompts(),
        request.started_at,
        request.response_cache,
        (error.code, error.message, error.param, error.status, error.retry_after_s) if error is not None else None,
        [output_of(sequence) for sequence in request.sequences],
        request.is_started,
    )
    return msgspec.msgpack.encode(ended)


def from_record(record: bytes) -> RequestState:
    """The request that `to_record` was given, with everything that readers use."""
    ended = _decode(record)
    request = RequestState(ended.spec, 0.0, ended.started_at)
    request.response_cache = ended.response_cache
    for sequence, output in zip(request.sequences, ended.outputs, strict=True):
        restore_output(sequence, output)
        sequence.is_started = ended.is_started
    if ended.error is not None:
        code, message, param, status, retry_after_s = ended.error
        request.error = StarlingError(code, message, param, status=status, retry_after_s=retry_after_s)
    request.end(Outcome.FINISHED if ended.error is None else Outcome.FAILED)
    return request
