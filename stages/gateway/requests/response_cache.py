"""Answers, stored under everything that determines their bytes (`cache.responses`; off by default).

The determinism guarantee makes an answer a function of the model, the prompt's tokens, the sampling parameters and
the seed, so a repeated request can be answered without computing anything. The cache stores `SequenceOutput`, not
response bodies: ids, times and the endpoint's format belong to each request.

    determined   the client gave the seed, or the temperature is 0 and the seed has no effect
    bypass       the gateway draws the seed; or the request is a turn of a session, which changes the session

Failed, cancelled and unfinished answers are never stored. The cache is bounded in entries and bytes. When it is full,
the tenant that holds most loses an entry, so that no tenant can drive out those of the others: the one that is least
recently used (lru), least frequently used (lfu) or oldest (fifo). An entry belongs to the tenant whose request was
computed. Entries older than `ttl_s` go in any case. The cache is in the gateway's memory and ends with the process.
Pure; the clock is injected.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from pipeline.config.schema import ResponseCacheConfig
from pipeline.eviction_order import EvictionOrder
from pipeline.protocol.messages import Sampling
from stages.gateway.requests.output import SequenceOutput
from stages.gateway.requests.spec import RequestSpec, ResponseKey

HIT, MISS, BYPASS = "hit", "miss", "bypass"  # values of the header X-Starling-Cache
ENTRY_BYTES = 512  # estimated overhead of an entry beside its content
_VERSION = 1


def is_determined(spec: RequestSpec) -> bool:
    """Would the same request, sent again, have the same answer?"""
    generation = spec.generation
    return generation.turn is None and (generation.seed is not None or generation.sampling.temperature == 0)


def key_of(spec: RequestSpec, kv_type: str) -> ResponseKey:
    """SHA-256 of everything that determines the answer. `kv_type`: of the model's KV pages.

    SHA-256, because clients choose the prompts and must not be able to construct one with another's key. The cache
    salt is included: clients that do not share cached pages do not share answers. Excluded is what has no effect on
    the bytes: priority, deadline, speculation, streaming, and without plugins the endpoint.
    """
    generation, tools = spec.generation, spec.generation.tools
    sequences = [
        (s.prompt_index, s.choice, spec.prompt_of(s), s.max_tokens, _effective(s.sampling), s.stop_ids)
        for s in spec.sequences
    ]
    parts = (
        _VERSION,
        spec.numerics,
        spec.digest,
        kv_type,
        generation.cache_salt,
        (generation.skip_special, bool(tools)),
        generation.stop,
        sequences,
        *(() if generation.prompt_logprobs is msgspec.UNSET else ("scores", generation.prompt_logprobs)),
        *((generation.constraint.kind, generation.constraint.text) if generation.constraint else ()),
        # A plugin gets these beside the text.
        *(("plugins", spec.plugins, generation.endpoint, spec.shown_model, spec.tenant) if spec.plugins else ()),
        # Stop strings act on the answer alone, and a constraint too.
        *(("reasoning", generation.reasoning) if generation.reasoning else ()),
        # Its first call ends an answer that may have one.
        *(("one call", tools.names, tools.format) if tools and tools.is_single else ()),
        *(("KV revision", spec.kv_revision) if spec.kv_revision else ()),
        *(("after", generation.constraint.after) if generation.constraint and generation.constraint.after else ()),
    )
    return ResponseKey(hashlib.sha256(msgspec.msgpack.encode(parts)).digest())


def _effective(sampling: Sampling) -> Sampling:
    """At temperature 0 the seed has no effect: the most likely token is taken."""
    return msgspec.structs.replace(sampling, seed=0) if sampling.temperature == 0 else sampling


class _Entry(msgspec.Struct):
    content: bytes  # msgpack of list[SequenceOutput]
    created_at: float  # s
    number: int  # entries are counted from the start
    tenant: str
    uses: int = 1

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) + ENTRY_BYTES


class ResponseCache:
    """One per gateway. All operations are O(log n), an eviction O(tenants) too. `clock` is monotonic, in s."""

    def __init__(self, config: ResponseCacheConfig, clock: Callable[[], float]) -> None:
        self.is_enabled = config.enabled
        self.max_bytes = config.max_size_mb << 20
        self.max_entries = config.max_entries
        self.bytes = 0
        self.evicted = self.expired = 0  # since the start
        self._ttl_s = config.ttl_s
        self._clock = clock
        self._n_stored = 0  # since the start
        self._n_uses = 0
        self._entries: OrderedDict[ResponseKey, _Entry] = OrderedDict()  # by age
        self._policy = config.eviction_policy
        self._orders: dict[str, EvictionOrder[ResponseKey]] = {}  # by tenant; only of those that have entries
        self._bytes_of: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._entries)

    def order(self) -> list[ResponseKey]:
        """Keys in the order of eviction, one tenant after the other. O(n log n); for tests."""
        return [key for order in self._orders.values() for key in order.order()]

    def get(self, key: ResponseKey) -> list[SequenceOutput] | None:
        """The answer, which counts as a use of it; None if it is not in the cache."""
        self.expire()
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.uses += 1
        self._orders[entry.tenant].remove(key)
        self._rank(key, entry)
        return msgspec.msgpack.decode(entry.content, type=list[SequenceOutput])

    def put(self, key: ResponseKey, outputs: list[SequenceOutput], tenant: str = "") -> bool:
        """Store a tenant's answer. An existing entry stays.

        False: it is larger than the cache, or than half of it and would take the place of other tenants' answers.
        """
        if key in self._entries:
            return True
        self._n_stored += 1
        entry = _Entry(msgspec.msgpack.encode(outputs), self._clock(), self._n_stored, tenant)
        others = self.bytes - self._bytes_of[tenant]
        if entry.size > max(self.max_bytes - others, self.max_bytes // 2):
            return False
        while len(self._entries) >= self.max_entries or self.bytes + entry.size > self.max_bytes:
            self._evict_for(entry)
        self._entries[key] = entry
        self.bytes += entry.size
        self._bytes_of[tenant] += entry.size
        self._rank(key, entry)
        return True

    def expire(self) -> None:
        """Drop entries older than `ttl_s`. `_entries` is ordered by age, which does not change with use."""
        if not self._ttl_s:
            return
        oldest = self._clock() - self._ttl_s
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.created_at > oldest:
                return
            self._drop(key)
            self.expired += 1

    def _evict_for(self, new: _Entry) -> None:
        """Evict an entry of the tenant that would hold most, with `new`: entries if there are too many, else bytes."""
        if len(self._entries) >= self.max_entries:
            largest = max(self._orders, key=lambda tenant: len(self._orders[tenant]) + (tenant == new.tenant))
        else:
            largest = max(self._orders, key=lambda tenant: self._bytes_of[tenant] + new.size * (tenant == new.tenant))
        self._forget(self._orders[largest].pop())
        self.evicted += 1

    def _drop(self, key: ResponseKey) -> None:
        self._orders[self._entries[key].tenant].remove(key)
        self._forget(key)

    def _forget(self, key: ResponseKey) -> None:
        """Remove an entry that is in no order any more."""
        entry = self._entries.pop(key)
        self.bytes -= entry.size
        self._bytes_of[entry.tenant] -= entry.size
        if not len(self._orders[entry.tenant]):
            del self._orders[entry.tenant], self._bytes_of[entry.tenant]

    def _rank(self, key: ResponseKey, entry: _Entry) -> None:
        self._n_uses += 1
        if entry.tenant not in self._orders:
            self._orders[entry.tenant] = EvictionOrder(self._policy)
        self._orders[entry.tenant].add(key, now=self._n_uses, uses=entry.uses, born=entry.number)
