"""An engine with the peers of peers.py in one process.

The test decides the order of events.  The world checks that every sequence ends once, with the tokens of an
undisturbed run, and that no bound is exceeded.
"""

from __future__ import annotations

from array import array
from collections import deque

from pipeline.protocol.messages import Cancel, Denied, Frame, Granted, KvReady, Submit
from shm.layer_groups import ONE_GROUP, LayerGroups
from shm.step_ring import StepsGeometry, blank_steps
from stages.scheduler.constraints.vetting import Vetting
from stages.scheduler.core.engine import Engine
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.sequence import Phase
from stages.scheduler.core.settings import Settings
from stages.scheduler.recovery.quarantine import DEATH

from .peers import VOCAB, WIDTH, Kv, Pages, Poisoned, Worker, reference, reference_scores, reference_vector

GATEWAY = b"gateway"


class World:
    """One engine, worker and kv; frames are delivered when the test requests it."""

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
        vetting: Vetting | None = None,
        mask_words: int = 0,
        is_causal: bool = True,
        groups: LayerGroups = ONE_GROUP,
        **settings,
    ) -> None:
        self.now = 0.0
        self.settings = Settings("m", batch, **settings)
        self.engine = Engine(self.settings, self.now, lambda name: (weights or {}).get(name, 1.0), vetting)
        # Expected to be short, steps are published at once: time rarely passes here.
        self.set_cost(100.0, 1.0, 0.001)
        self.geometry = StepsGeometry(
            self.settings.n_rows,
            batch,
            self.settings.max_samples,
            context,
            groups.n_pages(-(-context // 16) + 1),
            mask_words,
            WIDTH,
        )
        self.steps = blank_steps(self.geometry)
        self.ring = self.engine.worker.ring = Ring(self.steps, self.geometry, serial=1)
        self.pages = Pages(pages, page_tokens)
        self.kv = Kv(self.steps, self.pages, cache=cache)
        self.worker = Worker(self.steps, self.geometry, self.pages)
        self.worker.period = self.period = period
        self.worker.is_causal = is_causal
        self.context = context
        self.window = 0
        self.groups = groups
        self.generation = 0
        self.to_kv: deque[Frame] = deque()
        self.to_engine: deque[Frame] = deque()
        self.submitted: dict[str, Submit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.vectors: dict[str, bytes] = {}  # of pooled sequences
        self.scores: dict[str, bytes] = {}  # of prompt tokens
        self.errors: dict[str, str] = {}
        self.attachments: dict[str, int] = {}  # of the groups that computed the ends
        self.cancelled: set[str] = set()
        self.attach()
        self.kv_up()

    def set_cost(self, fixed_us: float, token_us: float, position_us: float, *, is_fixed: bool = False) -> None:
        """Reset the cost model to these coefficients; `is_fixed`: it does not learn from steps."""
        cost = self.engine.cost
        vars(cost).clear()
        cost.__init__(fixed_us, token_us, position_us)  # type: ignore[misc]
        if is_fixed:
            cost.learn = lambda *_: None  # type: ignore[method-assign]

    # -------------------------------------------------------------- events

    def attach(self) -> None:
        """Attach a worker with a new generation."""
        self.generation += 1
        self.ring.start(self.generation)
        self.worker.attach(self.generation)
        self.engine.attach(self.context, VOCAB, self.worker.is_causal, window=self.window, groups=self.groups)

    def kv_up(self) -> None:
        """kv reports its arena."""
        self.engine.kv_ready(self.kv.ready())

    def submit(self, frame: Submit) -> None:
        """Submit a sequence, for the first time or again."""
        if frame.sequence not in self.submitted:
            self.submitted[frame.sequence] = frame
            self.tokens[frame.sequence] = []
        self.engine.submissions.submit(GATEWAY, frame, self.now)

    def cancel(self, name: str) -> None:
        """Cancel a sequence."""
        self.cancelled.add(name)
        self.engine.submissions.cancel(Cancel(name))

    def run_round(self) -> int:
        """One round of the step loop; returns the number of steps published."""
        published = self.engine.steps.run_round(self.now)
        self.check_bounds()
        return published

    def compute_step(self) -> bool:
        """Compute one step; a poisoned step kills the worker."""
        try:
            return self.worker.step()
        except Poisoned:
            self.kill_worker()
            return True

    def kill_worker(self, half_way: bool = False) -> None:
        """Kill the worker, perhaps with the outputs of its step half written, and attach a new one."""
        if half_way and self.worker.waiting:
            try:
                self.worker.compute(int(self.steps.control[24]) + 1)
            except Poisoned:
                pass
        self.engine.detached(self.now, DEATH)
        self.collect()
        self.attach()

    def restart_kv(self) -> None:
        """Restart kv: it loses all frames and its whole state except the contents of the pages."""
        self.engine.kv_down()
        self.to_kv.clear()
        self.to_engine.clear()
        self.kv.fresh()
        self.kv_up()

    def exchange_with_kv(self, most: int = 1 << 30) -> None:
        """Deliver at most `most` frames to kv, and its answers to the engine."""
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
                self.engine.pages.granted(frame)
            elif isinstance(frame, Denied):
                self.engine.pages.denied(frame)
            elif isinstance(frame, KvReady):
                self.engine.kv_ready(frame)

    def advance(self, seconds: float) -> None:
        """Let time pass; then the engine ticks and repeats denied requests."""
        self.now += seconds
        self.engine.tick(self.now)
        self.engine.pages.retry()

    # -------------------------------------------------------------- checks

    def collect(self) -> None:
        """Take the frames for the gateways and check them."""
        for owner, moved in self.engine.outbox.tokens.items():
            assert owner == GATEWAY
            for part in moved:
                name = part.sequence
                assert name not in self.ends, f"{name} has output after its end"
                forced = len(self.submitted[name].forced) // 4
                assert part.start == forced + len(self.tokens[name]) or not part.tokens
                if part.scores:
                    frame = self.submitted[name]
                    known = self.scores.get(name, b"")
                    assert part.score_start == frame.scored + len(known) // (8 * (1 + frame.prompt_logprobs))
                    assert not self.tokens[name], "scores come before tokens"
                    self.scores[name] = known + part.scores
                self.tokens[name].extend(part.tokens)
                if part.logprobs:
                    assert [round(lp.logprob) for lp in part.logprobs] == [-t for t in part.tokens]
                if part.finish:
                    self.ends[name] = part.finish
                    self.errors[name] = part.error
                    self.attachments[name] = part.attachment
        self.engine.outbox.tokens.clear()
        for _, rejected in self.engine.outbox.rejected:
            assert rejected.sequence not in self.ends
            self.ends[rejected.sequence] = "rejected"
            self.errors[rejected.sequence] = rejected.code
        self.engine.outbox.rejected.clear()
        for owner, pooled in self.engine.outbox.pooled:
            assert owner == GATEWAY
            assert pooled.sequence not in self.ends, "two terminal events"
            self.vectors[pooled.sequence] = pooled.vector
            self.ends[pooled.sequence] = "pooled"
        self.engine.outbox.pooled.clear()

    def check_bounds(self) -> None:
        """Check the invariants of rows, positions, queues and published steps."""
        engine, table = self.engine, self.engine.table
        pacing, unacknowledged = engine.steps.pacing, engine.steps.unacknowledged
        steps = [step for step in unacknowledged if step.entries]
        expected_s = [step.expected_s for step in steps[:-1]]
        assert len(steps) <= pacing.depth or pacing.may_follow(len(expected_s), sum(expected_s), len(steps[-1].entries))
        assert len(unacknowledged) <= pacing.max_depth
        for step in unacknowledged:
            assert bool(step.entries) != bool(step.draft_entries), "a step has requests or draft sequences, never both"
        drafts = engine.drafts.sequences
        rows = [s.run.row for s in [*table.scheduled, *drafts]]
        assert len(drafts) <= self.settings.max_draft_sequences
        assert sorted(rows + list(table.free_rows)) == list(range(self.settings.n_rows))
        assert {id(s) for s in table.by_lease.values()} == {id(s) for s in table.scheduled}
        waiting = [t.waiting for t in engine.queues.tenants.values()]
        assert engine.queues.depth == len(list(engine.queues)) == sum(waiting)
        for step in unacknowledged:
            entries = [*step.entries, *step.draft_entries]
            assert len(entries) <= self.settings.max_batch_size
            assert step.tokens == sum(e.count for e in entries) <= engine.steps.budget.max_tokens
            assert step.samples <= self.settings.max_samples
        for s in table.scheduled:
            run = s.run
            assert run.computed <= run.planned <= min(run.leased, run.end - 1) or not run.pages
            assert run.inflight == sum(e.sequence is s for step in unacknowledged for e in step.entries)
            assert run.length == len(run.tokens) <= run.end
            assert s.is_done == (s.id not in table.live or table.live[s.id] is not s)
        for draft in drafts:
            run = draft.run
            assert draft.is_done or run.committed <= draft.base <= run.length == len(run.tokens) <= run.end
            assert not draft.is_done or run.computed <= draft.base, "draft tokens are committed to kv"
            assert run.computed <= run.planned <= run.leased or not run.pages
            assert run.inflight == sum(e.sequence is draft for step in unacknowledged for e in step.draft_entries)
        for s in table.live.values():
            assert (s in engine.queues) != (s.run.row >= 0)
            if s in engine.queues:
                assert s.phase is Phase.PENDING

    def strike(self, event: str) -> None:
        """Let one of the named events happen, and then one round."""
        match event:
            case "worker" | "half":
                self.kill_worker(half_way=event == "half")
            case "kv":
                self.restart_kv()
            case "lost lease":
                if self.engine.table.scheduled:
                    self.engine.pages._lost_lease(self.engine.table.scheduled[-1].run.lease_id)
            case "step":
                self.compute_step()
        self.run_round()
        self.exchange_with_kv()
        self.collect()

    def run_until_idle(self, rounds: int = 20_000) -> None:
        """Run until the engine is idle."""
        for _ in range(rounds):
            self.run_round()
            self.exchange_with_kv()
            self.compute_step()
            self.run_round()
            self.collect()
            if not self.engine.is_busy:
                break
            if not self.engine.steps.unacknowledged:
                self.advance(0.1)
        else:
            raise AssertionError(f"never done: {self.engine.table.scheduled} {self.engine.queues.depth}")
        self.exchange_with_kv()
        assert not self.engine.table.scheduled
        assert not self.kv.leases, "pages leaked"

    def check_all(self) -> None:
        """Every sequence has ended once, with the tokens of an undisturbed run."""
        for name, frame in self.submitted.items():
            assert name in self.ends, f"{name} never ended"
            got, end = self.tokens[name], self.ends[name]
            if end == "pooled":
                assert self.vectors[name] == reference_vector(frame), name
                assert not got
                continue
            expected, finish = reference(frame, self.period)
            forced = array("i")
            forced.frombytes(frame.forced)
            expected = expected[len(forced) :]
            if end in ("stop", "length"):
                assert (got, end) == (expected, finish), name
                if frame.prompt_logprobs >= 0:
                    assert self.scores.get(name, b"") == reference_scores(frame), name
            else:
                assert got == expected[: len(got)], name
                assert end in ("rejected", "timeout", "error") or name in self.cancelled
