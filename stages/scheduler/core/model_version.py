"""One instance of a model as the stage runs it: its engine, its step arena, its worker group and its kv.

Attaching a worker needs, in this order: a group that says `WorkerReady` (it is in no step), its
predecessors dead, the step arena, and kv's word that the KV arena stands.  Each event looks how far things
are and takes the next step.

    WorkerReady --> step arena --> KvAttach --> KvReady (Reconcile if asked) --> Attach
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.procfs import is_stopped
from pipeline.protocol import messages as m
from shm.arena import Arena, ArenaError, process_ticks
from shm.step_ring import StepsGeometry, create_steps
from stages.scheduler.core.engine import Engine, Settings
from stages.scheduler.core.ring import Ring
from stages.scheduler.policy.admission import Refusal
from stages.scheduler.policy.core_sharing import Claim
from stages.scheduler.recovery.fencing import Fence
from stages.scheduler.recovery.quarantine import DEATH, STALL
from stages.scheduler.recovery.reconnect_backoff import Patience
from stages.scheduler.recovery.stall_detector import Evidence

log = logging.getLogger("starling.scheduler")

AGAIN_S = 0.5  # between two attachments of one group
STANDS_S = 0.5  # a worker with a step that shows no sign of computing for so long: not ready
FENCE_WAIT_S = 0.2  # for a group that was killed, before looking again at the next tick


class Host:
    """`to_worker` and `to_kv` send a frame; both return False when the peer is not up.

    `max_context` 0: the checkpoint's own.
    """

    def __init__(
        self,
        settings: Settings,
        steps_path: Path,
        page_tokens: int,
        max_context: int,
        stuck_step_s: float,
        now: float,
        weight_of: Callable[[str], float],
        to_worker: Callable[[bytes, m.Frame], bool],
        to_kv: Callable[[m.Frame], bool],
    ) -> None:
        self.name = settings.model
        self.engine = Engine(settings, now, weight_of)
        self.steps_path = steps_path
        self.digest = ""
        self.vocabulary = ""  # digest of what its token ids mean; "": not known
        self.reason = "waiting for its worker"
        self.kv: m.KvReady | None = None
        self.kv_state: m.KvState | None = None
        self.cores: frozenset[int] = frozenset()  # that its ranks are pinned to; empty: any
        self.bell = ""  # the doorbell's path, see bell.py
        self.peer = b""  # the worker's connection, b"" while it is down
        self._settings = settings
        self._page_tokens = page_tokens
        self._max_context = max_context
        self._stuck_step_s = stuck_step_s
        self._to_worker = to_worker
        self._to_kv = to_kv
        self._hello: m.Hello | None = None
        self._ready: m.WorkerReady | None = None  # the group that waits to be attached, or is
        self._pids: tuple[tuple[int, int], ...] = ()  # of the group that has the arenas mapped
        self._fence: Fence | None = None
        self._strikes = 0  # against who is in the step that the fenced group did not finish
        self._fence_at = math.inf
        self._patience = Patience()
        self._arena: Arena | None = None
        self._geometry: StepsGeometry | None = None
        # Unlike any of an earlier life of this stage: doorbells and slots of those are void.
        self._generation = time.time_ns() // 1_000_000
        self._not_before = -math.inf  # a group that came back from an attachment at once gets another later
        self._progress = (-1, 0.0)  # the worker's counter, and since when it stands
        self._evidence = Evidence()
        self.stands_for_s = 0.0  # the worker has a step and shows no sign of computing it
        self.signs = 0  # grows each tick in which it is not this stage that has something to do

    # -------------------------------------------------------------- the worker

    def worker_down(self, now: float) -> None:
        """The connection is gone. A dead group is fenced at once, a living one gets time to return."""
        self.peer = b""
        hello = self._hello
        if hello is not None and process_ticks(hello.pid) == hello.start_ticks:
            self._fence_at = now + self._patience.lost(now, any(is_stopped(pid) for pid, _ in self._pids))
            self.engine.halt(now)
            return
        self.kill(now, "its worker has ended")

    def kill(self, now: float, why: str, strikes: int = DEATH) -> None:
        """The group dies whole, whatever state it is in; its unfinished steps are then void."""
        if self._fence is not None:
            return
        self._strikes = strikes
        self.engine.halt(now)
        self._ready = None
        self._fence_at = math.inf
        self.reason = why
        log.warning("worker group is fenced", extra={"model": self.name, "reason": why})
        self._fence = Fence(self._pids)
        self._fence.wait(FENCE_WAIT_S)
        self._look(now)

    def worker_ready(self, peer: bytes, hello: m.Hello, frame: m.WorkerReady, now: float) -> None:
        """The group is in no step and has let go of whatever it was attached to."""
        if self._fence is None:
            if not self._pids or (hello.pid, hello.start_ticks) in self._pids:
                self._fence_at = math.inf
                self.engine.detached(now)
            else:
                # A successor has come before its predecessor's end was noticed.
                self.kill(now, "replaced by a new worker")
        self.peer = peer
        self.vocabulary = frame.vocabulary
        self._hello = hello
        self._ready = frame
        self._look(now)

    def _look(self, now: float) -> None:
        """Take the next step towards an attached worker, if it can be taken."""
        if self._fence is not None:
            if not self._fence.is_closed:
                return
            self._fence = None
            self._pids = ()
            self._not_before = -math.inf
            # One that has not taken up its attachment was in no step.
            ring = self.engine.ring
            has_begun = ring is not None and ring.served_generation == self._generation
            self.engine.detached(now, self._strikes if has_begun else 0)
        ready = self._ready
        if ready is None or self.engine.is_attached or not self.peer or now < self._not_before:
            return
        if not self._has_arena(ready):
            return
        if self.kv is None or self.kv.error:
            self.reason = f"waiting for its KV arena{': ' + self.kv.error if self.kv else ''}"
            return
        if self.kv.digest != ready.digest:
            self.reason = "worker and kv have different files of this model: restart both"
            return
        ring = self.engine.ring
        assert ring is not None
        self._generation += 1
        next_step = ring.start(self._generation)
        attach = m.Attach(self.name, self._generation, str(self.steps_path), self.kv.arena_path, next_step, self.bell)
        if not self._to_worker(self.peer, attach):
            return
        self._not_before = now + AGAIN_S
        hello = self._hello
        self._pids = ready.pids or (((hello.pid, hello.start_ticks),) if hello else ())
        self._progress = (-1, now)
        self._patience.attached(now)
        self.reason = ""
        self.engine.attach(self._context(ready), ready.vocab_size)
        log.info("worker attached", extra={"model": self.name, "ranks": ready.ranks, "next_step": next_step})

    def _context(self, ready: m.WorkerReady) -> int:
        return min(ready.context_length, self._max_context or ready.context_length)

    def _has_arena(self, ready: m.WorkerReady) -> bool:
        """Create the step arena that this checkpoint needs, unless it stands; tell kv of a new one."""
        context, s = self._context(ready), self._settings
        geometry = StepsGeometry(
            s.n_rows, s.max_batch_size, s.max_samples, context, -(-context // self._page_tokens) + 1
        )
        if self._arena is not None and geometry == self._geometry and ready.digest == self.digest:
            return True
        self.close()
        try:
            self._arena, steps = create_steps(self.steps_path, geometry, bytes.fromhex(ready.digest), self._generation)
        except ArenaError as error:
            self.reason = str(error)
            log.error("no step arena", extra={"model": self.name, "reason": str(error)})
            return False
        self._geometry, self.digest = geometry, ready.digest
        self.engine.ring = Ring(steps, geometry, time.time_ns())
        self.kv = None
        self.attach_kv()
        return True

    # -------------------------------------------------------------- kv

    def attach_kv(self) -> None:
        """Tell kv where the rows are: it is new, or they are."""
        if self._arena is not None:
            self._to_kv(m.KvAttach(self.name, self.digest, str(self.steps_path)))

    def kv_down(self) -> None:
        self.kv = None
        self.engine.kv_down()

    def kv_ready(self, frame: m.KvReady, now: float) -> None:
        self.kv = frame
        if frame.error:
            self.reason = f"KV arena: {frame.error}"
            log.error("no KV arena", extra={"model": self.name, "reason": frame.error})
            return
        attached = self.engine.is_attached
        if self.engine.kv_ready(frame) and attached:
            # Its pages are others now: the worker must not write by the old tables.
            self.engine.halt(now)
            self._to_worker(self.peer, m.Detach(self._generation))
        self._look(now)

    # -------------------------------------------------------------- work

    def turn(self, now: float) -> None:
        """Complete and publish; ring if the worker sleeps."""
        engine = self.engine
        if engine.turn(now) and engine.ring is not None and engine.ring.worker_sleeps:
            self._to_worker(self.peer, m.StepPublished(self._generation, engine.ring.head))

    def claims(self, now: float) -> bool:
        """It has something to compute, and a worker that does."""
        return self.engine.is_attached and self.engine.has_work(now) and not self.problem

    def claim(self) -> Claim:
        engine = self.engine
        has_prompts = any(not sequence.outputs for sequence in engine.roster.held)
        # A group that is still mapping its arenas has a step and keeps no core from anybody.
        computes = bool(engine.unacknowledged) and engine.ring is not None and engine.ring.has_worker
        return Claim(self.name, self.cores, engine.stats.step_s.total, computes, has_prompts)

    def sleep(self) -> bool:
        """About to block: ask for a doorbell. False: there is something to take in already."""
        engine = self.engine
        if engine.ring is None or not engine.unacknowledged:
            return True
        wake_at = engine.wake_at
        return engine.ring.sleep(wake_at) < wake_at

    def wake(self) -> None:
        if self.engine.ring is not None:
            self.engine.ring.wake()

    def tick(self, now: float) -> None:
        """Every 100 ms: deadlines, a stuck step, a fence that has not closed, a worker that stays away."""
        self.engine.tick(now)
        self._look_for_signs(now)
        if now >= self._fence_at:
            self._patience.killed()
            self.kill(now, "its worker does not answer")
        self._look(now)
        engine = self.engine
        if engine.ring is None or not engine.unacknowledged or not engine.is_attached:
            self._progress = (-1, now)
            return
        value = engine.ring.progress + engine.ring.done
        if value != self._progress[0]:
            self._progress = (value, now)
        elif now - self._progress[1] > self._stuck_step_s:
            self.kill(now, f"a step made no progress for {self._stuck_step_s:g} s", STALL)

    def _look_for_signs(self, now: float) -> None:
        """How long the worker has stood with a step: `stands_for_s`."""
        engine = self.engine
        counter = -1
        if engine.ring is not None and engine.unacknowledged and engine.is_attached:
            counter = engine.ring.progress + engine.ring.done
        self._evidence.look(now, counter, self._pids)
        # A wait for the worker or kv is told by `problem`, of this model alone: the stage does not stand still.
        if engine.unacknowledged or (engine.is_busy and not engine.is_ready) or engine.waits_for_company(now) > 0:
            self.signs += 1
        self.stands_for_s = self._evidence.stands_for_s(now)

    @property
    def problem(self) -> str:
        """Why the model takes no requests now; "" when it does."""
        if not self.engine.is_ready:
            return self.reason or "waiting for kv"
        if self.stands_for_s > STANDS_S:
            return "its worker has a step and does not compute"
        return ""

    def state(self) -> m.ModelState:
        kv = self.kv_state
        return self.engine.state(self.digest, self.problem, kv.free + kv.cached if kv else 0)

    def retire(self) -> None:
        """This version of the model goes: who should still wait is refused, the worker lets go of the arenas."""
        refusal = Refusal("MODEL_UNAVAILABLE", f"{self.name} has been unloaded", "model", 1.0)
        for sequence in list(self.engine.roster.live.values()):
            self.engine.roster.reject(sequence, refusal)
        if self.peer:
            self._to_worker(self.peer, m.Detach(self._generation))

    def close(self) -> None:
        """Give up the step arena; whoever maps it keeps what it has."""
        if self._arena is not None:
            self.engine.ring = None
            self._arena.close()
            self._arena.unlink()
            self._arena = None
