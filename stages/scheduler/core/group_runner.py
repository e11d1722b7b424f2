"""One worker group of a model version, from its connection to its end: attachment, fence, stall detection.

A worker is attached in this order: the group sends `WorkerReady` (it computes no step), its predecessors are dead, the
step arena exists, and kv has reported the KV arena.  Each event takes the next step that is possible.

    WorkerReady --> step arena --> KvAttach --> KvReady (Reconcile if needed) --> Attach

When kv's arena is another one, the worker gets `Detach`, and is attached again after its next `WorkerReady`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.procfs import is_stopped
from pipeline.protocol import messages as m
from shm.layer_groups import LayerGroups
from stages.scheduler.core.engine import Engine
from stages.scheduler.recovery.attach_failure import AttachFailure
from stages.scheduler.recovery.fencing import Fence, is_alive
from stages.scheduler.recovery.inherited_steps import InheritedSteps
from stages.scheduler.recovery.quarantine import DEATH, STALL
from stages.scheduler.recovery.reconnect_backoff import ReconnectBackoff
from stages.scheduler.recovery.stall_detector import StallDetector
from stages.scheduler.recovery.starvation import Starvation

log = logging.getLogger("starling.scheduler")

REATTACH_S = 0.5  # between two attachments of one worker group
MAX_LOGGED = 16  # ids of requests in one log line
STALLED_S = 0.5  # a worker with a step and without signs of computing for so long makes the model not ready
FENCE_WAIT_S = 0.2  # after killing a group; if it has not exited by then, the next tick checks again


class Version(Protocol):
    """The version as its groups use it; implemented by `VersionRunner`."""

    name: str
    engine: Engine
    steps_path: Path
    doorbell: str

    def next_generation(self) -> int:
        """A generation that no ring of the version had before, in this process or an earlier one."""

    def context(self, ready: m.WorkerReady) -> int:
        """Positions of a sequence, at most."""

    def may_attach(self, group: GroupRunner, ready: m.WorkerReady, now: float) -> m.KvReady | str:
        """The arenas that the group may be attached to; or why it may not be yet."""

    def store_pids(self) -> str:
        """Before a group may compute: keep the processes of all groups for a successor of this process; or why not."""

    def settled(self, group: GroupRunner, now: float) -> None:
        """A group that kept the others from being attached does so no more."""


class GroupRunner:
    """Runs one worker group. Its methods are called on frames, connection events and at each tick."""

    def __init__(
        self,
        version: Version,
        number: int,
        stuck_step_s: float,
        to_worker: Callable[[bytes, m.Frame], bool],
        now: float,
        pids: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """`pids`: (pid, start_ticks) of a group that an earlier process of this stage has attached.

        It may compute a step until it sends `WorkerReady`, or is dead: until then it is not settled.
        """
        self.number = number
        self.peer = b""  # the worker's connection, b"" while it is down
        self.reason = "waiting for its worker"
        self.ready: m.WorkerReady | None = None  # the group that is attached, or waits to be
        self.pids = pids  # of the group that has the arenas mapped
        # False: it may compute a step with pages that kv gives to others as soon as the scheduler has reconciled.
        self.is_settled = not any(is_alive(*process) for process in pids)
        self.stalled_s = 0.0  # seconds since the worker with a step has shown signs of computing it
        self.attach_failure = AttachFailure()
        self.served_at = -math.inf  # s: when it could last compute steps
        self.engine_group = version.engine.groups[number]
        self._version = version
        self._engine = version.engine
        self._to_worker = to_worker
        self._hello: m.Hello | None = None
        self._is_detaching = False  # it has a `Detach` to answer, and may compute a step until then
        self._detach_sent = False  # and the frame has found a place in the queue
        self._fence: Fence | None = None
        self._suspicion = 0  # DEATH or STALL: why the fenced group did not finish its step
        self._inherited = None if self.is_settled else InheritedSteps(version.steps_path, number)
        self._fence_at = math.inf
        self._backoff = ReconnectBackoff()
        self._generation = version.next_generation()
        self._attach_after = -math.inf  # a group that returns right after its attachment is attached again later
        self._last_progress = (self._worker_counter(), now)  # the worker's counter, and when it last changed
        self._stall_detector = StallDetector()
        self._starvation = Starvation(stuck_step_s)

    @property
    def is_attached(self) -> bool:
        """It reads its ring."""
        return self.engine_group.link.is_attached

    @property
    def attachment(self) -> int:
        """The generation of its ring: no other attachment has it, of this process or an earlier one."""
        return self._generation

    @property
    def may_compute(self) -> bool:
        """Some process of it may compute a step of an attachment."""
        return self.is_attached or self._is_detaching or self._fence is not None or bool(self._steps)

    @property
    def _steps(self) -> int:
        return len(self.engine_group.steps.unacknowledged)

    # -------------------------------------------------------------- the worker

    def worker_down(self, now: float) -> None:
        """The connection is gone. A dead group is fenced at once, a living one gets time to reconnect."""
        self.peer = b""
        hello = self._hello
        if hello is not None and is_alive(hello.pid, hello.start_ticks):
            self._fence_at = now + self._backoff.allowed_s(now, any(is_stopped(pid) for pid, _ in self.pids))
            self._engine.halt(now, self.number)
            return
        self.kill(now, "its worker has exited")

    def kill(self, now: float, why: str, suspicion: int = DEATH) -> None:
        """Kill all processes of the group; its unfinished steps are void after that."""
        if self._fence is not None:
            return
        self._suspicion = suspicion
        self._engine.halt(now, self.number)
        self.ready = None
        self._is_detaching = False
        self._fence_at = math.inf
        self.attach_failure.clear()
        self.reason = why
        requests = sorted({sequence.request for sequence in self.engine_group.members})
        facts = {"model": self._version.name, "group": self.number, "reason": why, "request_ids": requests[:MAX_LOGGED]}
        log.warning("worker group is fenced", extra=facts)
        self._engine.record_worker("lost", now, self.number)
        self._fence = Fence(self.pids)
        self._fence.wait(FENCE_WAIT_S)
        self.advance(now)

    def worker_ready(self, peer: bytes, hello: m.Hello, frame: m.WorkerReady, now: float) -> None:
        """The group computes no step and has let go of what it was attached to."""
        if self._fence is None:
            if not self.pids or (hello.pid, hello.start_ticks) in self.pids:
                self._fence_at = math.inf
                self._engine.detached(now, number=self.number)
                self._settle(now)
            else:
                # A successor has started before the end of its predecessor was noticed.
                self.kill(now, "replaced by a new worker")
        self.peer = peer
        self._is_detaching = False
        self._hello = hello
        self.ready = frame
        if frame.error:
            self.attach_failure.record(f"its worker cannot attach: {frame.error}", now)
        self.advance(now)

    def advance(self, now: float) -> None:
        """Take the next step towards an attached worker, if it is possible."""
        if self._fence is not None:
            if not self._fence.is_closed:
                return
            self._fence = None
            self.pids = ()
            self._attach_after = -math.inf
            # A group that has not mapped the arenas of its attachment computed no step.
            ring = self.engine_group.link.ring
            has_begun = ring is not None and ring.served_generation == self._generation
            self._engine.detached(now, self._suspicion if has_begun else 0, self.number)
            self._settle(now)
        ready = self.ready
        if ready is None or self.is_attached or not self.peer or now < self._attach_after:
            return
        kv = self._version.may_attach(self, ready, now)
        if isinstance(kv, str):
            if kv not in ("", self.reason) and len(self._engine.groups) > 1:  # the model may be ready without it
                facts = {"model": self._version.name, "group": self.number, "reason": kv}
                log.warning("worker group is not attached", extra=facts)
            self.reason = kv or self.reason
            return
        self._attach(ready, kv, now)

    def _settle(self, now: float) -> None:
        was_settled, self.is_settled = self.is_settled, True
        self.close()
        if not was_settled:
            self.stalled_s, self.engine_group.link.is_stalled = 0.0, False
            self._version.settled(self, now)

    def _attach(self, ready: m.WorkerReady, kv: m.KvReady, now: float) -> None:
        version, link = self._version, self.engine_group.link
        ring = link.ring
        assert ring is not None
        self._generation = version.next_generation()
        hello, before = self._hello, self.pids
        self.pids = ready.pids or (((hello.pid, hello.start_ticks),) if hello else ())
        if problem := version.store_pids():
            self.pids = before
            self.attach_failure.record(problem, now)
            return
        next_step = ring.start(self._generation)
        attach = m.Attach(
            version.name, self._generation, str(version.steps_path), kv.arena_path, next_step, version.doorbell
        )
        if not self._to_worker(self.peer, attach):
            self.pids = before
            return
        self._attach_after = now + REATTACH_S
        self._last_progress = (-1, now)
        self._backoff.record_attached(now)
        self.reason = ""
        link.pid = self.pids[0][0] if self.pids else 0
        self._engine.record_worker("started", now, self.number)
        groups = LayerGroups(*ready.page_groups)
        self._engine.outbox.now = now
        self._engine.attach(
            version.context(ready),
            ready.vocab_size,
            ready.is_causal,
            ready.adapters,
            ready.window,
            groups,
            self.number,
        )
        facts = {"model": version.name, "group": self.number, "ranks": ready.ranks, "next_step": next_step}
        log.info("worker attached", extra=facts)

    def kv_replaced(self, now: float) -> None:
        """The KV arena has other contents: the worker must not write with the old page tables.

        It may be in a step, whose end would acknowledge the first step of another attachment: that waits for
        `WorkerReady`.
        """
        if not self.is_attached:
            self.is_settled = self.is_settled and not self.may_compute
            return
        self._engine.halt(now, self.number)
        self.ready = None
        self._is_detaching = True
        self.is_settled = False
        self.reason = "waiting for its worker"
        self._detach_sent = self._to_worker(self.peer, m.Detach(self._generation))

    def close(self) -> None:
        """Let go of the ring of an earlier process of this stage."""
        if self._inherited is not None:
            self._inherited.close()
            self._inherited = None

    def retire(self) -> None:
        """The version is unloaded: detach the worker from the arenas."""
        if self.peer:
            self._to_worker(self.peer, m.Detach(self._generation))

    # -------------------------------------------------------------- computing

    def run_round(self, now: float) -> None:
        """Complete and publish steps; ring the doorbell if the worker sleeps."""
        ring = self.engine_group.link.ring
        if self.engine_group.steps.run_round(now) and ring is not None and ring.worker_sleeps:
            self._to_worker(self.peer, m.StepPublished(self._generation, ring.head))

    @property
    def is_computing(self) -> bool:
        """It has a step. A group that is still mapping its arenas has one and uses no core."""
        ring = self.engine_group.link.ring
        return bool(self._steps) and ring is not None and ring.has_worker

    def prepare_sleep(self) -> bool:
        """Before the stage blocks: request a doorbell. False: a step is acknowledged already."""
        ring, steps = self.engine_group.link.ring, self.engine_group.steps
        if ring is None or not steps.unacknowledged:
            return True
        wake_step = steps.wake_step
        return ring.sleep(wake_step) < wake_step

    def cancel_sleep(self) -> None:
        """The stage is awake: no doorbell is needed."""
        ring = self.engine_group.link.ring
        if ring is not None:
            ring.wake()

    # -------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """At each tick: a stuck step, a fence that has not closed, a worker that does not reconnect."""
        self._stall_detector.observe(now, self._worker_counter(), self.pids)
        self.stalled_s = self._stall_detector.stalled_s(now)
        self.engine_group.link.is_stalled = self.stalled_s > STALLED_S
        if self._is_detaching and self.peer and not self._detach_sent:
            self._detach_sent = self._to_worker(self.peer, m.Detach(self._generation))
        if not self.is_settled and not self.peer and self._has_ended:
            self.kill(now, "its worker has exited")
        if now >= self._fence_at:
            self._backoff.record_killed()
            self.kill(now, "its worker does not answer")
        self.advance(now)
        self._end_attach_failure(now)
        counter = self._worker_counter()
        if counter != self._last_progress[0] or counter < 0:
            self._last_progress = (counter, now)
            self._starvation.progressed()
        elif not self._starvation.excuses(still_s := now - self._last_progress[1], self.pids):
            self.kill(now, f"a step made no progress for {still_s:.3g} s", STALL)

    @property
    def _has_ended(self) -> bool:
        """No process of the group that may compute a step runs on: all have exited, or one is stopped."""
        return any(is_stopped(pid) for pid, _ in self.pids) or not any(is_alive(*process) for process in self.pids)

    def _end_attach_failure(self, now: float) -> None:
        ring = self.engine_group.link.ring
        if self.is_attached and self._engine.leases.is_up and ring is not None and ring.has_worker:
            self.attach_failure.clear()
            self.served_at = now

    def _worker_counter(self) -> int:
        """Grows while the worker computes; -1: it has no step."""
        if self._inherited is not None:
            return self._inherited.counter
        ring = self.engine_group.link.ring
        if ring is None or not self._steps or not (self.is_attached or self._is_detaching):
            return -1
        return ring.progress + ring.done
