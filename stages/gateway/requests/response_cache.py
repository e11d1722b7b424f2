"""Whole answers, kept by everything that determines their bytes (`cache.responses`; off by default).

Law 1 makes an answer a function of the model, the prompt's tokens, the sampling parameters and the seed, so
it can be given again without computing it.  What is kept is the record's part of an answer (tokens, text,
logprobs, how it ended), not a body: ids, times and the form of the endpoint are each request's own.

    determined   the client gave the seed, or the temperature is 0 and no seed matters
    bypass       a drawn seed asks for a new answer; a turn of a session changes what the session holds

Errors, cancelled and unfinished answers are never kept.  Bounded by entries and by bytes; when full, the
entry goes that was used longest ago (lru), was used least (lfu), or came first (fifo).  One that is older
than `ttl_s` goes whatever its use.  In the gateway's memory: it ends with the process.  Pure; the clock is given.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NewType

import msgspec

from pipeline.config.schema import ResponseCacheConfig
from pipeline.protocol.messages import Logprob, Sampling
from shm.pages import NUMERICS
from stages.gateway.requests.state import RequestState, SequenceState

ResponseKey = NewType("ResponseKey", bytes)

HIT, MISS, BYPASS = "hit", "miss", "bypass"  # as the header X-Starling-Cache says it
ENTRY_BYTES = 512  # what an entry takes beside its content
_VERSION = 1


class Line(msgspec.Struct, array_like=True):
    """One sequence's answer, as `record.Sequence` has it at the end."""

    tokens: bytes  # i32 little-endian, those that count: up to and including a stop
    logprobs: list[Logprob]
    text: str
    end: int  # output tokens that are text
    finish: str
    stop_string: str


def is_determined(request: RequestState) -> bool:
    """Would the same request, sent again, have the same answer?"""
    ask = request.ask
    return ask.turn is None and (ask.seed is not None or ask.sampling.temperature == 0)


def key_of(request: RequestState, digest: str, kv_type: str) -> ResponseKey:
    """SHA-256 of all that determines the answer. `digest`: of the model; `kv_type`: of its pages.

    SHA-256 because prompts come from strangers: nobody may construct one that has another's key.  The salt
    is in it, so that whoever shares no pages shares no answers.  Left out is what law 1 says has no effect:
    priority, deadline, speculation, streaming, the endpoint.
    """
    ask = request.ask
    lines = [
        (s.prompt_index, s.choice, s.prompt, s.max_tokens, _drawn_from(s.sampling), s.stop_ids)
        for s in request.sequences
    ]
    what = (_VERSION, NUMERICS, digest, kv_type, ask.cache_salt, ask.skip_special, ask.stop, lines)
    return ResponseKey(hashlib.sha256(msgspec.msgpack.encode(what)).digest())


def _drawn_from(sampling: Sampling) -> Sampling:
    """At temperature 0 nothing is drawn: the first candidate is taken, whatever the seed."""
    return msgspec.structs.replace(sampling, seed=0) if sampling.temperature == 0 else sampling


def lines_of(request: RequestState) -> list[Line]:
    """What a finished request leaves."""
    return [
        Line(
            array("i", s.tokens[: s.used]).tobytes(),
            s.logprobs[: s.used],
            "".join(s.text),
            s.end,
            s.finish,
            s.stop_string,
        )
        for s in request.sequences
    ]


def fill(sequence: SequenceState, line: Line, now: float) -> None:
    """Give a sequence that has not begun its whole answer. Nothing of its prompt is computed."""
    tokens = array("i")
    tokens.frombytes(line.tokens)
    sequence.tokens = tokens.tolist()
    sequence.logprobs = line.logprobs
    sequence.cached_tokens = sequence.n_prompt
    sequence.begun_at = now
    sequence.text, sequence.text_length = [line.text], len(line.text)
    sequence.end, sequence.used, sequence.is_flushed = line.end, len(sequence.tokens), True
    sequence.finish, sequence.stop_string = line.finish, line.stop_string


class _Entry(msgspec.Struct):
    content: bytes  # msgpack of list[Line]
    born: float
    uses: int
    tick: int  # of the last use; with the policy's rank, its place in the order of leaving

    @property
    def size(self) -> int:
        return len(self.content) + ENTRY_BYTES


class ResponseCache:
    """One per gateway. All operations are O(log n). `clock`: s, monotonic."""

    def __init__(self, config: ResponseCacheConfig, clock: Callable[[], float]) -> None:
        self.is_enabled = config.enabled
        self.max_bytes = config.max_size_mb << 20
        self.max_entries = config.max_entries
        self.bytes = 0
        self.evicted = self.expired = 0  # since the start
        self._policy = config.eviction_policy
        self._ttl_s = config.ttl_s
        self._clock = clock
        self._ticks = 0
        self._entries: OrderedDict[ResponseKey, _Entry] = OrderedDict()  # by age
        self._heap: list[tuple[int, int, ResponseKey]] = []  # (rank, tick, key); stale where tick differs

    def __len__(self) -> int:
        return len(self._entries)

    def order(self) -> list[ResponseKey]:
        """The next to go first. O(n log n); for tests."""
        return [key for _, tick, key in sorted(self._heap) if self._is_live(key, tick)]

    def get(self, key: ResponseKey) -> list[Line] | None:
        """The answer, and it counts as used; None when there is none that is young enough."""
        self.expire()
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.uses += 1
        if self._policy != "fifo":
            self._rank(key, entry)
        return msgspec.msgpack.decode(entry.content, type=list[Line])

    def put(self, key: ResponseKey, lines: list[Line]) -> bool:
        """Keep an answer. False: it is larger than everything that may be kept. One that is there stays."""
        if key in self._entries:
            return True
        entry = _Entry(msgspec.msgpack.encode(lines), self._clock(), 1, 0)
        if entry.size > self.max_bytes:
            return False
        while len(self._entries) >= self.max_entries or self.bytes + entry.size > self.max_bytes:
            self._evict()
        self._entries[key] = entry
        self.bytes += entry.size
        self._rank(key, entry)
        return True

    def expire(self) -> None:
        """Drop what is too old. Whoever is dropped is at the front: age does not change with use."""
        if not self._ttl_s:
            return
        oldest = self._clock() - self._ttl_s
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.born > oldest:
                return
            self._drop(key)
            self.expired += 1

    def _evict(self) -> None:
        while True:
            _, tick, key = heapq.heappop(self._heap)
            if self._is_live(key, tick):
                break
        self._drop(key)
        self.evicted += 1

    def _drop(self, key: ResponseKey) -> None:
        self.bytes -= self._entries.pop(key).size

    def _is_live(self, key: ResponseKey, tick: int) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.tick == tick

    def _rank(self, key: ResponseKey, entry: _Entry) -> None:
        self._ticks += 1
        entry.tick = self._ticks
        rank = entry.uses if self._policy == "lfu" else entry.tick
        heapq.heappush(self._heap, (rank, entry.tick, key))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [e for e in self._heap if self._is_live(e[2], e[1])]
            heapq.heapify(self._heap)
