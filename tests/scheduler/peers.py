"""A small deterministic worker and kv manager over a real step arena.

The model of these tests: the *state* at position p is a hash of the state at p - 1 and of token p, stored in the page
that the page table contains for p.  A sample is a hash of (state, seed, output position).  So every later token
changes if a position is skipped, computed twice with different tokens, read from a page that another sequence has
written, or if a page is reused too early.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict

import numpy as np

from pipeline.protocol.messages import (
    Acquire,
    Commit,
    Denied,
    Extend,
    Frame,
    Granted,
    KvReady,
    Reconcile,
    Release,
    Sampling,
    Submit,
)
from shm import step_ring as sh
from shm.step_ring import Steps, StepsGeometry

VOCAB = 128
WIDTH = 3  # values of a hidden state
SAMPLED = 97  # ids from here on are never sampled
STOP = 5
MASK = (1 << 61) - 1


def mix(state: int, value: int) -> int:
    """The hash of a state and the next value."""
    return ((state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 + 0x1234567) & MASK


def sample(state: int, seed: int, position: int, echo: int = -1) -> int:
    """The token at output index `position`; mostly `echo` unless it is -1 (a text that repeats itself)."""
    mixed = mix(mix(state, seed), position)
    if echo >= 0 and (mixed >> 40) % 20:
        return echo
    return (mixed >> 20) % SAMPLED


def reference(frame: Submit, period: int = 0) -> tuple[list[int], str]:
    """The output tokens and the finish reason of an undisturbed run; `period`: see `Worker`."""
    tokens = array("i")
    tokens.frombytes(frame.prompt)
    state = 0
    for token in tokens:
        state = mix(state, token)
    output: list[int] = []
    if not frame.max_tokens:
        return output, "length"
    while True:
        echo = tokens[len(tokens) - period] if 0 < period <= len(tokens) else -1
        token = sample(state, frame.sampling.seed, len(output), echo)
        output.append(token)
        tokens.append(token)
        if token in frame.stop_ids:
            return output, "stop"
        if len(output) >= frame.max_tokens:
            return output, "length"
        state = mix(state, token)


def submission(
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    seed: int = 0,
    tenant: str = "t",
    stop: bool = False,
    forced: list[int] | None = None,
    model: str = "m",
    **fields,
) -> Submit:
    """A frame with a request of one sequence."""
    return Submit(
        sequence=name,
        request=name,
        model=model,
        tenant=tenant,
        prompt=array("i", prompt).tobytes(),
        max_tokens=max_tokens,
        sampling=Sampling(seed=seed, logprobs=fields.pop("logprobs", -1)),
        forced=array("i", forced or []).tobytes(),
        stop_ids=fields.pop("stop_ids", (STOP,) if stop else ()),
        **fields,
    )


def hidden_state(state: int) -> np.ndarray:
    """A position's hidden state, as the worker of these tests sums it up: (WIDTH,) i64."""
    return np.array([state >> (20 * i) & 0xFFFFF for i in range(WIDTH)], np.int64) << sh.POOL_SCALE - 16


def reference_vector(frame: Submit) -> bytes:
    """The vector of a pooled submission."""
    state, states = 0, []
    for token in array("i", frame.prompt):
        state = mix(state, token)
        states.append(hidden_state(state))
    if frame.pooling == "mean":
        total, n = sum(states), len(states)
    else:
        total, n = states[-1 if frame.pooling == "last" else 0], 1
    assert isinstance(total, np.ndarray)
    return (total.astype(np.float64) / (n * 2.0**sh.POOL_SCALE)).astype("<f4").tobytes()


def score(state: int, token: int, top: int) -> list[int]:
    """The words of a prompt token's score after the given state; the floats as their bits."""
    rank = 1 + mix(state, token) % 90
    words = [rank, int(np.float32(-rank).view(np.int32))]
    for i in range(top):
        words += [mix(state, i) % VOCAB, int(np.float32(-i).view(np.int32))]
    return words


def reference_scores(frame: Submit) -> bytes:
    """The scores of all tokens of a prompt but those that the frame does not want."""
    state, words = 0, []
    tokens = array("i", frame.prompt)
    for i, token in enumerate(tokens):
        if i >= frame.scored:
            words += score(state, token, frame.prompt_logprobs)
        state = mix(state, token)
    return np.array(words, "<i4").tobytes()


class Pages:
    """The KV arena: a state for each (page, offset). It outlives workers and kv."""

    def __init__(self, total: int, page_tokens: int, path: str = "") -> None:
        """In private memory, or in the file `path`, which is created if absent."""
        self.total = total
        self.page_tokens = page_tokens
        shape = (total, page_tokens)
        if path:
            mode = "r+" if os.path.exists(path) else "w+"
            self.states: np.ndarray = np.memmap(path, np.int64, mode, shape=shape)  # type: ignore[call-overload]
        else:
            self.states = np.zeros(shape, np.int64)


class Worker:
    """Rank 0 of a worker group: computes the steps of the ring in order."""

    def __init__(self, steps: Steps, geometry: StepsGeometry, pages: Pages) -> None:
        self.s = steps
        self.g = geometry
        self.pages = pages
        self.generation = 0
        self.period = 0  # most samples repeat the token this many positions before
        self.voids = 0  # samples whose masks were not there
        self.differs = 0  # one in so many samples differs from `reference`; 0: none
        self.poison: set[int] = set()  # prompt tokens whose computation kills the worker
        self.in_batch: list[int] = []  # entries of each step done
        self.is_causal = True
        self.whole: dict[int, int] = {}  # unless it is causal: the length of a prompt by its first token

    def attach(self, generation: int) -> None:
        """Compute the steps of this generation from now on."""
        self.generation = generation

    @property
    def waiting(self) -> int:
        """Published steps that are not acknowledged."""
        return int(self.s.control[sh.HEAD]) - int(self.s.control[sh.DONE])

    def step(self) -> bool:
        """Compute the next published step and acknowledge it. False: no step is published."""
        number = int(self.s.control[sh.DONE]) + 1
        if number > int(self.s.control[sh.HEAD]):
            return False
        self.compute(number)
        self.s.control[sh.DONE] = number
        return True

    def compute(self, number: int) -> None:
        """Compute a step without acknowledging it. Raises `Poisoned` in the middle of it."""
        slot = number % sh.SLOTS
        head = self.s.slot_head[slot]
        assert head[sh.SLOT_STEP] == number, "slot of another step"
        assert head[sh.SLOT_GENERATION] == self.generation == int(self.s.control[sh.GENERATION])
        n = int(head[sh.SLOT_ENTRIES])
        assert 1 <= n <= self.g.max_entries
        seen = set()
        used = n_pooled = 0
        for row, start, count, samples, base, epoch, first, pooled in self.s.entries[slot, :n].tolist():
            assert row not in seen, "a row twice in a step"
            seen.add(row)
            assert base == (n_pooled if pooled else used)
            assert not (pooled and samples)
            n_pooled += pooled > 0
            assert self.is_causal or (pooled and start == 0 and count == self.whole[int(self.s.tokens[row, 0])])
            assert 0 <= samples <= count
            assert count >= 1
            used += samples
            if epoch and self.s.tokens[row, start] == sh.NO_MASK:
                self.s.out_token[slot, base : base + samples] = sh.NO_MASK
                if samples == 1:
                    self.s.tokens[row, start + count] = sh.NO_MASK
                continue
            self._entry(slot, row, start, count, samples, base, epoch)
            if pooled:
                self._pool(slot, row, start + first, pooled, base, count - first)
        assert used == head[sh.SLOT_SAMPLES] <= self.g.max_samples
        self.s.timing[slot] = (0, 1000 * number, 1000 * number + 100_000 + 1000 * used, 0)
        self.in_batch.append(n)

    def _allowed(self, row: int, known: int, epoch: int, token: int) -> int:
        """The token that replaces `token` under the row's mask; NO_MASK if that is not there."""
        place = known % sh.MASK_SLOTS
        if self.s.mask_ready[row, place] != sh.mask_tag(epoch, known):
            self.voids += 1
            return sh.NO_MASK
        bits = np.unpackbits(self.s.masks[row, place].view(np.uint8), bitorder="little")
        ids = np.flatnonzero(bits)
        return token if bits[token] else int(ids[token % len(ids)])

    def _pool(self, slot: int, row: int, first: int, n: int, place: int, left: int) -> None:
        assert 1 <= n <= left
        assert place < sh.MAX_POOLED
        table, size = self.s.tables[row], self.pages.page_tokens
        states = [int(self.pages.states[table[p // size], p % size]) for p in range(first, first + n)]
        self.s.pooled[slot, place] = sum(hidden_state(state) for state in states)
        self.s.pool_states[slot, place] = n

    def _entry(self, slot: int, row: int, start: int, count: int, samples: int, base: int, epoch: int) -> None:
        tokens, table = self.s.tokens[row], self.s.tables[row]
        size = self.pages.page_tokens
        seed = int(self.s.row_ints[row, sh.SEED])
        output_start = int(self.s.row_ints[row, sh.OUTPUT_START])
        if start:
            state = int(self.pages.states[table[(start - 1) // size], (start - 1) % size])
        else:
            state = 0
        for p in range(start, start + count):
            if int(tokens[p]) in self.poison:
                raise Poisoned
            state = mix(state, int(tokens[p]))
            self.pages.states[table[p // size], p % size] = state
            behind = start + count - 1 - p
            n_top = int(self.s.row_ints[row, sh.SCORED]) - 1
            if behind < samples and n_top >= 0 and p + 1 < output_start:
                assert not epoch
                words = np.array(score(state, int(tokens[p + 1]), n_top), np.int32)
                at = (slot, base + samples - 1 - behind)
                self.s.out_token[at], self.s.out_logprob[at] = words[0], words[1:2].view(np.float32)[0]
                self.s.out_top_id[at][:n_top] = words[2::2]
                self.s.out_top_lp[at][:n_top] = words[3::2].view(np.float32)
            elif behind < samples:
                i = samples - 1 - behind
                echo = int(tokens[p + 1 - self.period]) if 0 < self.period <= p + 1 else -1
                token = sample(state, seed, p + 1 - output_start, echo)
                if self.differs and not mix(state, 77) // 1024 % self.differs:
                    token = (token + 1) % SAMPLED
                if epoch:
                    token = self._allowed(row, p + 1, epoch, token)
                self.s.out_token[slot, base + i] = token
                self.s.out_logprob[slot, base + i] = -token
                if samples == 1:
                    tokens[p + 1] = token


class Poisoned(Exception):
    """The worker is killed."""


class Kv:
    """The kv stage: allocation, prefix cache by token chains, LRU eviction, conservation checked."""

    def __init__(self, steps: Steps, pages: Pages, model: str = "m", cache: bool = True) -> None:
        self.s = steps
        self.pages = pages
        self.model = model
        self.cache = cache
        self.generation = 1
        self.digest = self.path = ""
        self.fresh()

    def fresh(self) -> None:
        """Forget everything, as after a restart."""
        self.leases: dict[str, list[int]] = {}
        self.rows: dict[str, tuple[int, int]] = {}  # row, serial
        self.salts: dict[str, str] = {}
        self.refs = [0] * self.pages.total
        self.index: OrderedDict[tuple[str | int, ...], int] = OrderedDict()  # salt, chain -> full page, oldest first
        self.reconciled = False

    def ready(self) -> KvReady:
        """The frame that reports the arena."""
        pages = self.pages
        return KvReady(
            self.model,
            self.digest,
            self.path,
            pages.total,
            pages.page_tokens,
            1,
            self.reconciled,
            "",
            self.generation,
        )

    def check(self) -> None:
        """Check that reference counts equal the leases."""
        leased = {p for pages in self.leases.values() for p in pages}
        assert leased == {p for p in range(self.pages.total) if self.refs[p]}
        for page in leased:
            assert self.refs[page] == sum(pages.count(page) for pages in self.leases.values())

    def handle(self, frame: Frame) -> Frame | None:
        """Process a frame; returns the answer, if there is one."""
        answer = self._handle(frame)
        self.check()
        return answer

    def _handle(self, frame: Frame) -> Frame | None:
        if isinstance(frame, Reconcile):
            self.reconciled = True
            for lease, row, _, pages in frame.leases:
                self.leases[lease] = list(pages)
                self.rows[lease] = (row, int(self.s.row_ints[row, sh.SERIAL]))
                for page in pages:
                    self.refs[page] += 1
            return self.ready()
        assert self.reconciled, "asked before Reconcile"
        if isinstance(frame, Acquire):
            return self._acquire(frame)
        if isinstance(frame, Extend):
            return self._grow(frame.id, frame.sequence, frame.want_tokens, 0)
        if isinstance(frame, Commit):
            self._index(frame.sequence, frame.n_tokens)
        elif isinstance(frame, Release) and frame.sequence in self.leases:
            self._index(frame.sequence, frame.n_tokens)
            for page in self.leases.pop(frame.sequence):
                self.refs[page] -= 1
        return None

    def _acquire(self, frame: Acquire) -> Frame:
        size = self.pages.page_tokens
        assert frame.sequence not in self.leases, "leased twice"
        self.rows[frame.sequence] = (frame.row, int(self.s.row_ints[frame.row, sh.SERIAL]))
        tokens = self.s.tokens[frame.row, : frame.n_tokens].tolist()
        pages: list[int] = []
        most = frame.n_tokens - 1 if frame.sharable < 0 else frame.sharable
        while self.cache and (len(pages) + 1) * size <= most:
            page = self.index.get((frame.salt, *tokens[: (len(pages) + 1) * size]))
            if page is None:
                break
            pages.append(page)
        for page in pages:
            self.refs[page] += 1
        self.leases[frame.sequence] = pages
        self.salts[frame.sequence] = frame.salt
        answer = self._grow(frame.id, frame.sequence, frame.want_tokens, len(pages) * size)
        if isinstance(answer, Denied):
            for page in self.leases.pop(frame.sequence):
                self.refs[page] -= 1
        return answer

    def _grow(self, request_id: int, lease: str, want: int, cached: int) -> Frame:
        pages = self.leases[lease]
        need = -(-want // self.pages.page_tokens) - len(pages)
        indexed = set(self.index.values())
        free = [p for p in range(self.pages.total) if not self.refs[p] and p not in indexed]
        evictable = [(chain, p) for chain, p in self.index.items() if not self.refs[p]]
        if need > len(free) + len(evictable):
            fits = -(-want // self.pages.page_tokens) <= self.pages.total
            return Denied(request_id, lease, fits, need, len(free) + len(evictable), self.pages.total, self.model)
        for chain, page in evictable[: max(0, need - len(free))]:
            del self.index[chain]
            free.append(page)
        for page in free[: max(0, need)]:
            self.refs[page] += 1
            pages.append(page)
        return Granted(request_id, lease, tuple(pages), cached, self.model)

    def _index(self, lease: str, n_tokens: int) -> None:
        size = self.pages.page_tokens
        row, serial = self.rows[lease]
        tokens = self.s.tokens[row, :n_tokens].tolist()
        if not self.cache or int(self.s.row_ints[row, sh.SERIAL]) != serial:
            return
        for i in range(n_tokens // size):
            chain = (self.salts.get(lease, ""), *tokens[: (i + 1) * size])
            page = self.leases[lease][i]
            if chain not in self.index and page not in self.index.values():
                self.index[chain] = page
