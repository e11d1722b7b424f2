"""One model version as the stage runs it: its engine, step arena, worker group and KV arena.

A worker is attached in this order: a group sends `WorkerReady` (it computes no step), its predecessors are dead, the
step arena exists, and kv has reported the KV arena.  Each event takes the next step that is possible.

    WorkerReady --> step arena --> KvAttach --> KvReady (Reconcile if needed) --> Attach

When kv's arena is another one, the worker gets `Detach`, and is attached again after its next `WorkerReady`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.procfs import is_stopped
from pipeline.protocol import messages as m
from shm.arena import Arena, ArenaError
from shm.layer_groups import LayerGroups
from shm.step_ring import StepsGeometry, create_steps
from stages.scheduler.constraints.vetting import Vetting
from stages.scheduler.core.engine import Engine
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.settings import Settings
from stages.scheduler.policy.admission import Refusal
from stages.scheduler.policy.core_sharing import Claim
from stages.scheduler.recovery.attach_failure import AttachFailure
from stages.scheduler.recovery.fencing import Fence, is_alive
from stages.scheduler.recovery.quarantine import DEATH, STALL
from stages.scheduler.recovery.reconnect_backoff import ReconnectBackoff
from stages.scheduler.recovery.stall_detector import StallDetector
from stages.scheduler.recovery.starvation import Starvation

log = logging.getLogger("starling.scheduler")

REATTACH_S = 0.5  # between two attachments of one worker group
KV_RETRY_S = 1.0  # between two requests for an arena that kv could not provide
STALLED_S = 0.5  # a worker with a step and without signs of computing for so long makes the model not ready
MAX_LOGGED = 16  # ids of requests in one log line
FENCE_WAIT_S = 0.2  # after killing a group; if it has not exited by then, the next tick checks again


class VersionRunner:
    """Runs one model version. Its methods are called on frames, connection events and every 100 ms."""

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
        vetting: Vetting | None = None,
    ) -> None:
        """`to_worker` and `to_kv` send a frame and return False when the peer is not connected.

        `max_context` 0: the checkpoint's own.
        """
        self.name = settings.model
        self.engine = Engine(settings, now, weight_of, vetting)
        self.steps_path = steps_path
        self.digest = ""
        self.vocabulary = ""  # digest of what its token ids mean; "": not known
        self.kernels = ""  # names those of its worker
        self.places: tuple[int, tuple[int, ...]] = 0, ()  # the number of its ranks, and of those of each memory node
        self.reason = "waiting for its worker"
        self.kv: m.KvReady | None = None
        self._ask_kv_at = 0.0  # s: if it has reported an error
        self.kv_state: m.KvState | None = None
        self.cores: frozenset[int] = frozenset()  # that its ranks are pinned to; empty: any
        self.weight = 1.0  # share of cores that it has in common with other models
        self.doorbell = ""  # path of the doorbell socket
        self.peer = b""  # the worker's connection, b"" while it is down
        self.stalled_s = 0.0  # seconds since the worker with a step has shown signs of computing it
        self.progress = 0  # grows in each tick in which this stage waits for the worker, kv or a batch
        self._settings = settings
        self._page_tokens = page_tokens
        self._max_context = max_context
        self._to_worker = to_worker
        self._to_kv = to_kv
        self._hello: m.Hello | None = None
        self._ready: m.WorkerReady | None = None  # the group that is attached, or waits to be
        self._pids: tuple[tuple[int, int], ...] = ()  # of the group that has the arenas mapped
        self._is_detaching = False  # it has a `Detach` to answer, and may compute a step until then
        self._detach_sent = False  # and the frame has found a place in the queue
        self._fence: Fence | None = None
        self._suspicion = 0  # DEATH or STALL: why the fenced group did not finish its step
        self._fence_at = math.inf
        self._backoff = ReconnectBackoff()
        self._attach_failure = AttachFailure()
        self._arena: Arena | None = None
        self._geometry: StepsGeometry | None = None
        # Differs from all generations of earlier processes of this stage, whose doorbells and slots are void.
        self._generation = time.time_ns() // 1_000_000
        self._attach_after = -math.inf  # a group that returns right after its attachment is attached again later
        self._last_progress = (-1, 0.0)  # the worker's counter, and when it last changed
        self._stall_detector = StallDetector()
        self._starvation = Starvation(stuck_step_s)

    # -------------------------------------------------------------- the worker

    def worker_down(self, now: float) -> None:
        """The connection is gone. A dead group is fenced at once, a living one gets time to reconnect."""
        self.peer = b""
        hello = self._hello
        if hello is not None and is_alive(hello.pid, hello.start_ticks):
            self._fence_at = now + self._backoff.allowed_s(now, any(is_stopped(pid) for pid, _ in self._pids))
            self.engine.halt(now)
            return
        self.kill(now, "its worker has exited")

    def kill(self, now: float, why: str, suspicion: int = DEATH) -> None:
        """Kill all processes of the group; its unfinished steps are void after that."""
        if self._fence is not None:
            return
        self._suspicion = suspicion
        self.engine.halt(now)
        self._ready = None
        self._is_detaching = False
        self._fence_at = math.inf
        self._attach_failure.clear()
        self.reason = why
        requests = sorted({sequence.request for sequence in self.engine.table.scheduled})
        facts = {"model": self.name, "reason": why, "request_ids": requests[:MAX_LOGGED]}
        log.warning("worker group is fenced", extra=facts)
        self.engine.record_worker("lost", now)
        self._fence = Fence(self._pids)
        self._fence.wait(FENCE_WAIT_S)
        self._advance(now)

    def worker_ready(self, peer: bytes, hello: m.Hello, frame: m.WorkerReady, now: float) -> None:
        """The group computes no step and has let go of what it was attached to."""
        if self._fence is None:
            if not self._pids or (hello.pid, hello.start_ticks) in self._pids:
                self._fence_at = math.inf
                self.engine.detached(now)
            else:
                # A successor has started before the end of its predecessor was noticed.
                self.kill(now, "replaced by a new worker")
        self.peer = peer
        self._is_detaching = False
        self.vocabulary, self.kernels = frame.vocabulary, frame.kernels
        self.places = frame.ranks, frame.nodes
        self._hello = hello
        self._ready = frame
        if frame.error:
            self._attach_failure.record(f"its worker cannot attach: {frame.error}", now)
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Take the next step towards an attached worker, if it is possible."""
        if self._fence is not None:
            if not self._fence.is_closed:
                return
            self._fence = None
            self._pids = ()
            self._attach_after = -math.inf
            # A group that has not mapped the arenas of its attachment computed no step.
            ring = self.engine.worker.ring
            has_begun = ring is not None and ring.served_generation == self._generation
            self.engine.detached(now, self._suspicion if has_begun else 0)
        ready = self._ready
        if ready is None or self.engine.worker.is_attached or not self.peer or now < self._attach_after:
            return
        if not self._ensure_arena(ready, now):
            return
        if self.kv is None or self.kv.error:
            self.reason = f"waiting for its KV arena{': ' + self.kv.error if self.kv else ''}"
            return
        if self.kv.digest != ready.digest:
            self.reason = "worker and kv have different files of this model: restart both"
            return
        self._attach(ready, self.kv, now)

    def _attach(self, ready: m.WorkerReady, kv: m.KvReady, now: float) -> None:
        ring = self.engine.worker.ring
        assert ring is not None
        self._generation += 1
        next_step = ring.start(self._generation)
        attach = m.Attach(self.name, self._generation, str(self.steps_path), kv.arena_path, next_step, self.doorbell)
        if not self._to_worker(self.peer, attach):
            return
        self._attach_after = now + REATTACH_S
        hello = self._hello
        self._pids = ready.pids or (((hello.pid, hello.start_ticks),) if hello else ())
        self._last_progress = (-1, now)
        self._backoff.record_attached(now)
        self.reason = ""
        self.engine.outbox.worker_pid = self._pids[0][0] if self._pids else 0
        self.engine.record_worker("started", now)
        context = self._context(ready)
        groups = LayerGroups(*ready.page_groups)
        self.engine.attach(context, ready.vocab_size, ready.is_causal, ready.adapters, ready.window, groups)
        log.info("worker attached", extra={"model": self.name, "ranks": ready.ranks, "next_step": next_step})

    def _context(self, ready: m.WorkerReady) -> int:
        return min(ready.context_length, self._max_context or ready.context_length)

    def _ensure_arena(self, ready: m.WorkerReady, now: float) -> bool:
        """Create the step arena that this checkpoint needs, unless it exists, and report a new one to kv."""
        groups = LayerGroups(*ready.page_groups)
        geometry = self._settings.steps_geometry(
            self._context(ready), self._page_tokens, ready.vocab_size, ready.width, groups.n_groups
        )
        if self._arena is not None and geometry == self._geometry and ready.digest == self.digest:
            return True
        self.close()
        try:
            self._arena, steps = create_steps(self.steps_path, geometry, bytes.fromhex(ready.digest), self._generation)
        except ArenaError as error:
            if self._attach_failure.record(str(error), now):
                log.error("step arena cannot be created", extra={"model": self.name, "reason": str(error)})
            return False
        self._geometry, self.digest = geometry, ready.digest
        self.engine.constraints.set_rows(str(self.steps_path))
        self.engine.worker.ring = Ring(steps, geometry, time.time_ns())
        self.kv = None
        self.attach_kv()
        return True

    # -------------------------------------------------------------- kv

    @property
    def arena_bytes(self) -> tuple[int, int]:
        """(reserved, used) bytes of the step arena; used is the share of its rows that sequences have."""
        if self._arena is None:
            return 0, 0
        n_rows = self._settings.n_rows
        return self._arena.size, self._arena.size * (n_rows - len(self.engine.table.free_rows)) // n_rows

    def attach_kv(self) -> None:
        """Send kv the path of the step arena: kv or the arena is new."""
        if self._arena is not None:
            self._to_kv(m.KvAttach(self.name, self.digest, str(self.steps_path)))

    def kv_down(self) -> None:
        """kv is disconnected."""
        self.kv = None
        self.engine.kv_down()

    def kv_ready(self, frame: m.KvReady, now: float) -> None:
        """kv has the model's arena, or reports why it has none."""
        self.kv = frame
        if frame.error:
            self._ask_kv_at = now + KV_RETRY_S
            if self._attach_failure.record(f"KV arena: {frame.error}", now):
                log.error("KV arena is not available", extra={"model": self.name, "reason": frame.error})
            return
        was_attached = self.engine.worker.is_attached
        if self.engine.kv_ready(frame) and was_attached:
            # The arena has other contents: the worker must not write with the old page tables.  It may be in a step,
            # whose end would acknowledge the first step of another attachment: that waits for `WorkerReady`.
            self.engine.halt(now)
            self._ready = None
            self._is_detaching = True
            self.reason = "waiting for its worker"
            self._detach_sent = self._to_worker(self.peer, m.Detach(self._generation))
        self._advance(now)

    # -------------------------------------------------------------- computing

    def run_round(self, now: float) -> None:
        """Complete and publish steps; ring the doorbell if the worker sleeps."""
        ring = self.engine.worker.ring
        self.engine.outbox.now = now
        if self.engine.steps.run_round(now) and ring is not None and ring.worker_sleeps:
            self._to_worker(self.peer, m.StepPublished(self._generation, ring.head))

    def wants_cores(self, now: float) -> bool:
        """It has something to compute, and a worker that computes."""
        return self.engine.worker.is_attached and self.engine.has_work(now) and not self.problem

    def claim(self) -> Claim:
        """Its claim to its cores."""
        engine, ring = self.engine, self.engine.worker.ring
        has_prompts = any(not sequence.outputs for sequence in engine.table.scheduled)
        # A group that is still mapping its arenas has a step and uses no core.
        is_computing = bool(engine.steps.unacknowledged) and ring is not None and ring.has_worker
        return Claim(self.name, self.cores, engine.stats.worker_s, is_computing, has_prompts, self.weight)

    def prepare_sleep(self) -> bool:
        """Before the stage blocks: request a doorbell. False: a step is acknowledged already."""
        ring, steps = self.engine.worker.ring, self.engine.steps
        if ring is None or not steps.unacknowledged:
            return True
        wake_step = steps.wake_step
        return ring.sleep(wake_step) < wake_step

    def cancel_sleep(self) -> None:
        """The stage is awake: no doorbell is needed."""
        if self.engine.worker.ring is not None:
            self.engine.worker.ring.wake()

    # -------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Every 100 ms: deadlines, a stuck step, a fence that has not closed, a worker that does not reconnect."""
        self.engine.tick(now)
        if self.kv is not None and self.kv.error and now >= self._ask_kv_at:
            self._ask_kv_at = now + KV_RETRY_S
            self.attach_kv()
        counter = self._worker_counter()
        self._detect_stall(now, counter)
        if self._is_detaching and self.peer and not self._detach_sent:
            self._detach_sent = self._to_worker(self.peer, m.Detach(self._generation))
        if now >= self._fence_at:
            self._backoff.record_killed()
            self.kill(now, "its worker does not answer")
        self._advance(now)
        self._report_attach_failure(now)
        counter = self._worker_counter()
        if counter != self._last_progress[0] or counter < 0:
            self._last_progress = (counter, now)
            self._starvation.progressed()
        elif not self._starvation.excuses(still_s := now - self._last_progress[1], self._pids):
            self.kill(now, f"a step made no progress for {still_s:.3g} s", STALL)

    def _report_attach_failure(self, now: float) -> None:
        """End the model's requests if its worker has not been able to attach for seconds."""
        engine, failure = self.engine, self._attach_failure
        ring = engine.worker.ring
        if engine.is_ready and ring is not None and ring.has_worker:
            failure.clear()
        engine.worker.failure = failure.lasting(now)
        if engine.worker.failure:
            engine.fail_all("MODEL_UNAVAILABLE", f"model {self.name} cannot run: {engine.worker.failure}")

    def _worker_counter(self) -> int:
        """Grows while the worker computes; -1: it has no step."""
        engine = self.engine
        ring = engine.worker.ring
        if ring is None or not engine.steps.unacknowledged or not (engine.worker.is_attached or self._is_detaching):
            return -1
        return ring.progress + ring.done

    def _detect_stall(self, now: float, counter: int) -> None:
        engine = self.engine
        self._stall_detector.observe(now, counter, self._pids)
        # Waiting for the worker or kv is reported by `problem`, for this model alone: the stage is not stuck.
        is_waiting = engine.is_busy and not engine.is_ready
        if engine.steps.unacknowledged or is_waiting or engine.rows.batch_wait_s(now) > 0:
            self.progress += 1
        self.stalled_s = self._stall_detector.stalled_s(now)

    # -------------------------------------------------------------- state

    @property
    def problem(self) -> str:
        """Why the model is not ready; "" when it is."""
        if self._attach_failure.error:
            return self._attach_failure.error
        if not self.engine.is_ready:
            return self.reason or "waiting for kv"
        if self.stalled_s > STALLED_S:
            return "its worker has a step and does not compute"
        return ""

    def state(self) -> m.ModelState:
        """State for the gateways."""
        kv = self.kv_state
        state = self.engine.state(self.digest, self.problem, kv.free + kv.cached if kv else 0)
        ranks, nodes = self.places
        return msgspec.structs.replace(state, kernels=self.kernels, ranks=ranks, nodes=nodes)

    def retire(self) -> None:
        """The version is unloaded: refuse its remaining sequences, and detach the worker from the arenas."""
        self.engine.reject_all(Refusal("MODEL_UNAVAILABLE", f"{self.name} has been unloaded", "model", 1.0))
        if self.peer:
            self._to_worker(self.peer, m.Detach(self._generation))

    def close(self) -> None:
        """Remove the step arena; processes that map it keep their mapping."""
        if self._arena is not None:
            self.engine.worker.ring = None
            self._arena.close()
            self._arena.unlink()
            self._arena = None
