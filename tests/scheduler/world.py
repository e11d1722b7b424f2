"""An engine between the peers of peers.py: everything a sequence's life needs, in one process.

The caller decides the order in which things happen; the world keeps the books: every sequence ends
once, with the tokens of an undisturbed run, and no bound is ever exceeded.
"""

from __future__ import annotations

from array import array
from collections import deque

from pipeline.protocol.messages import Cancel, Denied, Frame, Granted, KvReady, Submit
from shm.step_ring import StepsGeometry, blank_steps
from stages.scheduler.core.engine import FAR, Engine, Settings, follows
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.sequence import State
from stages.scheduler.draft.draft_sequence import Companion
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.recovery.quarantine import DEATH

from .peers import VOCAB, Kv, Pages, Poisoned, Worker, reference

GATEWAY = b"gateway"


class World:
    def __init__(
        self,
        *,
        batch: int = 4,
        pages: int = 64,
        page_tokens: int = 16,
        context: int = 400,
        cache: bool = True,
        period: int = 0,
        weights: dict[str, float] | None = None,
        **settings,
    ) -> None:
        self.now = 0.0
        self.settings = Settings("m", batch, **settings)
        self.engine = Engine(self.settings, self.now, lambda name: (weights or {}).get(name, 1.0))
        # Steps that seem short are followed up at once: time stands still here most of the time.
        self.engine.cost = CostModel(100.0, 1.0, 0.001)
        self.geometry = StepsGeometry(
            self.settings.n_rows, batch, self.settings.max_samples, context, -(-context // 16) + 1
        )
        self.steps = blank_steps(self.geometry)
        self.ring = self.engine.ring = Ring(self.steps, self.geometry, serial=1)
        self.pages = Pages(pages, page_tokens)
        self.kv = Kv(self.steps, self.pages, cache=cache)
        self.worker = Worker(self.steps, self.geometry, self.pages)
        self.worker.period = self.period = period
        self.context = context
        self.generation = 0
        self.to_kv: deque[Frame] = deque()
        self.to_engine: deque[Frame] = deque()
        self.submitted: dict[str, Submit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.frames = 0
        self.attach()
        self.kv_up()

    # -------------------------------------------------------------- what may happen

    def attach(self) -> None:
        self.generation += 1
        self.ring.start(self.generation)
        self.worker.attach(self.generation)
        self.engine.attach(self.context, VOCAB)

    def kv_up(self) -> None:
        self.engine.kv_ready(self.kv.ready())

    def submit(self, frame: Submit) -> None:
        if frame.sequence not in self.submitted:
            self.submitted[frame.sequence] = frame
            self.tokens[frame.sequence] = []
        self.engine.door.submit(GATEWAY, frame, self.now)

    def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        self.engine.door.cancel(Cancel(name))

    def turn(self) -> int:
        published = self.engine.turn(self.now)
        self.check_bounds()
        return published

    def work(self) -> bool:
        """One step of the worker; a poisoned one kills it."""
        try:
            return self.worker.step()
        except Poisoned:
            self.kill_worker()
            return True

    def kill_worker(self, half_way: bool = False) -> None:
        """It dies, perhaps with the outputs of its step half written, and comes back."""
        if half_way and self.worker.waiting:
            try:
                self.worker.compute(int(self.steps.control[24]) + 1)
            except Poisoned:
                pass
        self.engine.detached(self.now, DEATH)
        self.collect()
        self.attach()

    def restart_kv(self) -> None:
        """It loses all frames under way and all it knew but the pages' contents."""
        self.engine.kv_down()
        self.to_kv.clear()
        self.to_engine.clear()
        self.kv.fresh()
        self.kv_up()

    def talk_to_kv(self, most: int = 1 << 30) -> None:
        """Carry frames to kv and its answers back."""
        self.to_kv.extend(self.engine.leases.frames)
        self.engine.leases.frames.clear()
        while self.to_kv and most > 0:
            answer = self.kv.handle(self.to_kv.popleft())
            if answer is not None:
                self.to_engine.append(answer)
            most -= 1
        while self.to_engine:
            frame = self.to_engine.popleft()
            if isinstance(frame, Granted):
                self.engine.granted(frame)
            elif isinstance(frame, Denied):
                self.engine.denied(frame)
            elif isinstance(frame, KvReady):
                self.engine.kv_ready(frame)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.engine.tick(self.now)
        self.engine.pages_may_be_free()

    # -------------------------------------------------------------- the books

    def collect(self) -> None:
        """Take what the gateways would be told, and check it."""
        for owner, moved in self.engine.roster.moved.items():
            assert owner == GATEWAY
            for part in moved:
                name = part.sequence
                assert name not in self.ends, f"{name} speaks after its end"
                forced = len(self.submitted[name].forced) // 4
                assert part.start == forced + len(self.tokens[name]) or not part.tokens
                self.tokens[name].extend(part.tokens)
                if part.logprobs:
                    assert [round(lp.logprob) for lp in part.logprobs] == [-t for t in part.tokens]
                if part.finish:
                    self.ends[name] = part.finish
                    self.errors[name] = part.error
        self.engine.roster.moved.clear()
        for _, rejected in self.engine.roster.rejected:
            assert rejected.sequence not in self.ends
            self.ends[rejected.sequence] = "rejected"
            self.errors[rejected.sequence] = rejected.code
        self.engine.roster.rejected.clear()

    def check_bounds(self) -> None:
        engine = self.engine
        roster = engine.roster
        mine = [step for step in engine.unacknowledged if not isinstance(step.entries[0].sequence, Companion)]
        expected_s = [step.expected_s for step in mine[:-1]]
        assert len(mine) <= engine.depth or follows(len(expected_s), sum(expected_s), len(mine[-1].entries))
        assert len(engine.unacknowledged) <= FAR
        for step in engine.unacknowledged:
            assert len({isinstance(entry.sequence, Companion) for entry in step.entries}) == 1, "each by themselves"
        companions = engine.companions.held
        rows = [s.row for s in [*roster.held, *companions]]
        assert len(companions) <= self.settings.companions
        assert sorted(rows + list(roster.free_rows)) == list(range(self.settings.n_rows))
        waiting = [t.waiting for t in engine.queues.tenants.values()]
        assert engine.queues.depth == len(list(engine.queues)) == sum(waiting)
        for step in engine.unacknowledged:
            assert len(step.entries) <= self.settings.max_batch_size
            assert step.tokens == sum(e.count for e in step.entries) <= engine.budget.max_tokens
            assert step.samples <= self.settings.max_samples
        for s in roster.held:
            assert s.computed <= s.planned <= min(s.leased, s.end - 1) or not s.pages
            assert s.inflight == sum(e.sequence is s for step in engine.unacknowledged for e in step.entries)
            assert s.length == len(s.tokens) <= s.end
            assert s.is_over == (s.id not in roster.live or roster.live[s.id] is not s)
        for s in companions:
            assert s not in roster.live.values()
            assert s not in roster.held
            assert s.is_over or s.committed <= s.base <= s.length == len(s.tokens) <= s.end
            assert not s.is_over or s.computed <= s.base, "kv is told of proposals"
            assert s.computed <= s.planned <= s.leased or not s.pages
            assert s.inflight == sum(e.sequence is s for step in engine.unacknowledged for e in step.entries)
        for s in roster.live.values():
            assert (s in engine.queues) != (s.row >= 0)
            if s in engine.queues:
                assert s.state is State.PENDING

    def settle(self, rounds: int = 20_000) -> None:
        """Let everything run until nothing is left to do."""
        for _ in range(rounds):
            self.turn()
            self.talk_to_kv()
            self.work()
            self.turn()
            self.collect()
            if not self.engine.is_busy:
                break
            if not self.engine.unacknowledged:
                self.advance(0.1)
        else:
            raise AssertionError(f"never done: {self.engine.roster.held} {self.engine.queues.depth}")
        self.talk_to_kv()
        assert not self.engine.roster.held
        assert not self.kv.leases, "pages leaked"

    def check_all(self) -> None:
        """Every sequence has ended once, with the right tokens."""
        for name, frame in self.submitted.items():
            assert name in self.ends, f"{name} never ended"
            got, end = self.tokens[name], self.ends[name]
            expected, finish = reference(frame, self.period)
            forced = array("i")
            forced.frombytes(frame.forced)
            expected = expected[len(forced) :]
            if end in ("stop", "length"):
                assert (got, end) == (expected, finish), name
            else:
                assert got == expected[: len(got)], name
                assert end in ("rejected", "timeout", "error") or name in self.cancelled
