"""One model version as the stage runs it: its engine, step arena, KV arena and worker groups (group_runner.py).

A version with several groups has one table of rows, a step ring for each (shm/step_rings.py), and one KV arena.  kv
learns which leases exist from this process alone, so it is asked to reconcile them only when every group has settled:
when no group computes a step that an earlier process of this stage has published, or that belongs to other contents of
the KV arena.  The processes of attached groups are kept in a file for that.  A version with one group needs none: all
this begins when its group says that it computes no step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.files import replace_file
from pipeline.protocol import messages as m
from shm.arena import Arena, ArenaError
from shm.checkpoint import Index
from shm.decoding import DECODE_ERRORS
from shm.layer_groups import LayerGroups
from shm.step_ring import StepsGeometry
from shm.step_rings import create_rings
from stages.scheduler.constraints.vetting import Vetting
from stages.scheduler.core.engine import Engine
from stages.scheduler.core.group_runner import STALLED_S, GroupRunner
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.settings import Settings
from stages.scheduler.policy.admission import Refusal
from stages.scheduler.policy.core_sharing import Claim
from stages.scheduler.recovery.attach_failure import AttachFailure
from stages.scheduler.recovery.fencing import Fence

log = logging.getLogger("starling.scheduler")

KV_RETRY_S = 1.0  # between two requests for an arena that kv could not provide
GROUPS_SUFFIX = "groups"  # MODEL.groups, beside the step arena: the processes of each attached group

Pids = tuple[tuple[int, int], ...]


class VersionRunner:
    """Runs one model version. Its methods are called on frames, connection events and at each tick."""

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

        `max_context` 0: the checkpoint's own.  Raises `OSError` if the processes of attached groups cannot be read.
        """
        self.name = settings.model
        self.engine = Engine(settings, now, weight_of, vetting)
        self.steps_path = steps_path
        self.digest = ""
        self.vocabulary = ""  # digest of what its token ids mean; "": not known
        self.kernels = ""  # names those of its workers
        self.kv: m.KvReady | None = None
        self._kv_failure = AttachFailure()  # why kv has no arena
        self._ask_kv_at = 0.0  # s: if it has reported an error
        self._first_ready_at = math.inf  # s: the first group was ready
        # The arenas were created before any group has said that it computes no step: kv must not reconcile yet.
        self._is_ahead = False
        self.kv_state: m.KvState | None = None
        self.cores: frozenset[int] = frozenset()  # that its ranks are pinned to; empty: any
        self.places: dict[int, tuple[int, tuple[int, ...]]] = {}  # by group: its ranks, and those of each memory node
        self.weight = 1.0  # share of cores that it has in common with other models
        self.doorbell = ""  # path of the doorbell socket
        self.group_stages: tuple[str, ...] = ()  # names of its worker groups, for the operator
        self.progress = 0  # grows in each tick in which this stage waits for the worker, kv or a batch
        self._settings = settings
        self._page_tokens = page_tokens
        self._max_context = max_context
        self._to_kv = to_kv
        self._arenas: list[Arena] = []  # of the rows and each ring
        self._arena_generation = 0
        self._geometry: StepsGeometry | None = None
        self._adapters: tuple[tuple[str, str], ...] = ()  # of the attached groups
        # Differs from all generations of earlier processes of this stage, whose doorbells and slots are void.
        self._generation = time.time_ns() // 1_000_000
        before = self._read_pids()
        n = settings.worker_groups
        self._strays = Fence(tuple(process for pids in before[n:] for process in pids))  # there are fewer groups now
        before = [*before[:n], *((),) * n]
        self.groups = [GroupRunner(self, number, stuck_step_s, to_worker, now, before[number]) for number in range(n)]

    # -------------------------------------------------------------- the worker groups

    def worker_down(self, peer: bytes, now: float) -> None:
        """A connection is gone; perhaps that of one of the groups."""
        for group in self.groups:
            if group.peer == peer:
                group.worker_down(now)

    def worker_ready(self, peer: bytes, hello: m.Hello, frame: m.WorkerReady, now: float) -> None:
        """See `GroupRunner.worker_ready`."""
        if not 0 <= frame.group < len(self.groups):
            facts = {"model": self.name, "group": frame.group, "groups": len(self.groups)}
            log.error("a worker group that the configuration does not have: restart the worker pool", extra=facts)
            return
        self._first_ready_at = min(self._first_ready_at, now)
        self.vocabulary, self.kernels = frame.vocabulary, frame.kernels
        self.places[frame.group] = frame.ranks, frame.nodes
        self.groups[frame.group].worker_ready(peer, hello, frame, now)

    def settled(self, group: GroupRunner, now: float) -> None:
        """See `group_runner.Version`."""
        for other in self.groups:
            if other is not group:
                other.advance(now)

    def next_generation(self) -> int:
        """See `group_runner.Version`."""
        self._generation += 1
        return self._generation

    def context(self, ready: m.WorkerReady) -> int:
        """See `group_runner.Version`."""
        return min(ready.context_length, self._max_context or ready.context_length)

    def may_attach(self, group: GroupRunner, ready: m.WorkerReady, now: float) -> m.KvReady | str:
        """See `group_runner.Version`."""
        if not self._strays.is_closed or not all(one.is_settled for one in self.groups):
            return "waiting for the end of another worker group's step"
        others = [one for one in self.groups if one is not group and one.may_compute]
        if others and (ready.digest != self.digest or (ready.adapters != self._adapters)):
            return "the worker groups have different files of this model or its adapters: reload the model"
        if not self._ensure_arena(group, ready, now):
            return ""
        kv = self.kv
        if self._is_ahead:
            self._is_ahead = False
            if kv is not None and not kv.error:
                self.engine.kv_ready(kv)
        if kv is None or kv.error:
            return f"waiting for its KV arena{': ' + kv.error if kv else ''}"
        if kv.digest != ready.digest:
            return "worker and kv have different files of this model: restart both"
        self._adapters = ready.adapters
        return kv

    def create_ahead(self, index: Index) -> None:
        """Create the step arena of a file before its worker is ready, and let kv map it meanwhile.

        Nothing that `worker_ready` decides is decided here: a group that an earlier process of this stage has attached
        may still compute a step, even if there is no arena (that process may have removed it at its end).  So the
        leases are reconciled when a group is ready, and nothing is done for several groups that are not settled.  What
        it cannot do now, it tries again then.
        """
        is_settled = self._strays.is_closed and all(group.is_settled for group in self.groups)
        if self._arenas or self._first_ready_at < math.inf or not is_settled:
            return
        h = index.hyper
        context = min(h.context_length, self._max_context or h.context_length)
        geometry = self._steps_geometry(context, h.vocab_size, h.width, h.page_groups)
        self._is_ahead = True
        with contextlib.suppress(ArenaError):
            self._create_arena(index.digest, geometry)

    def _ensure_arena(self, group: GroupRunner, ready: m.WorkerReady, now: float) -> bool:
        """Create the step arena that this checkpoint needs, unless it exists, and report a new one to kv."""
        groups = LayerGroups(*ready.page_groups)
        geometry = self._steps_geometry(self.context(ready), ready.vocab_size, ready.width, groups)
        if self._arenas and geometry == self._geometry and ready.digest == self.digest:
            return True
        try:
            self._create_arena(ready.digest, geometry)
        except ArenaError as error:
            if group.attach_failure.record(str(error), now):
                log.error("step arena cannot be created", extra={"model": self.name, "reason": str(error)})
            return False
        return True

    def _steps_geometry(self, context: int, vocab_size: int, width: int, groups: LayerGroups) -> StepsGeometry:
        return self._settings.steps_geometry(context, self._page_tokens, vocab_size, width, groups.n_groups)

    def _create_arena(self, digest: str, geometry: StepsGeometry) -> None:
        self.close()
        generation = self.next_generation()
        self._arenas, steps = create_rings(
            self.steps_path, geometry, bytes.fromhex(digest), len(self.groups), generation
        )
        self._geometry, self.digest, self._arena_generation = geometry, digest, generation
        self.engine.constraints.set_rows(str(self.steps_path))
        for number, views in enumerate(steps):
            self.engine.set_ring(number, Ring(views, geometry, time.time_ns()))
        self.kv = None
        self.attach_kv()

    # -------------------------------------------------------------- processes of attached groups

    @property
    def _pids_path(self) -> Path:
        return self.steps_path.with_suffix(f".{GROUPS_SUFFIX}")

    def store_pids(self) -> str:
        """See `group_runner.Version`."""
        if len(self.groups) > 1:
            try:
                replace_file(self._pids_path, msgspec.msgpack.encode([group.pids for group in self.groups]))
            except OSError as error:
                return f"{self._pids_path} cannot be written: {error.strerror}"
        return ""

    def _read_pids(self) -> list[Pids]:
        """Those of the groups that an earlier process of this stage has attached; [] if there was one group.

        Raises `OSError`: a file that cannot be read now may name a group that computes.
        """
        try:
            return msgspec.msgpack.decode(self._pids_path.read_bytes(), type=list[Pids])
        except (FileNotFoundError, *DECODE_ERRORS):
            return []

    # -------------------------------------------------------------- kv

    @property
    def arena_bytes(self) -> tuple[int, int]:
        """(reserved, used) bytes of the step arena; used is the share of its rows that sequences have."""
        if not self._arenas:
            return 0, 0
        n_rows, size = self._settings.n_rows, sum(arena.size for arena in self._arenas)
        return size, size * (n_rows - len(self.engine.table.free_rows)) // n_rows

    def attach_kv(self) -> None:
        """Send kv the path of the step arena: kv or the arena is new."""
        if self._arenas:
            self._to_kv(m.KvAttach(self.name, self.digest, str(self.steps_path), self._arena_generation))

    def kv_down(self) -> None:
        """kv is disconnected."""
        self.kv = None
        self.engine.kv_down()

    def kv_ready(self, frame: m.KvReady, now: float) -> None:
        """kv has the model's arena, or reports why it has none."""
        self.kv = frame
        if frame.error:
            self._ask_kv_at = now + KV_RETRY_S
            if self._kv_failure.record(f"KV arena: {frame.error}", now):
                log.error("KV arena is not available", extra={"model": self.name, "reason": frame.error})
            return
        self._kv_failure.clear()
        if self._is_ahead:
            return
        if self.engine.kv_ready(frame):
            for group in self.groups:
                group.kv_replaced(now)
        for group in self.groups:
            group.advance(now)

    # -------------------------------------------------------------- computing

    def complete(self, now: float) -> None:
        """Process the acknowledged steps of each group."""
        self.engine.outbox.now = now
        for group in self.engine.groups:
            group.steps.complete(now)

    @property
    def has_step_everywhere(self) -> bool:
        """Each group that has sequences has a step to compute: the next one is not urgent."""
        return all(group.steps.unacknowledged or not group.members for group in self.engine.groups)

    def run_round(self, now: float) -> None:
        """Complete and publish steps of each group."""
        self.engine.outbox.now = now
        for group in self.groups:
            group.run_round(now)

    def set_allowed_depth(self, depth: int) -> None:
        """Steps of each group that may be unacknowledged from now on."""
        for group in self.engine.groups:
            group.steps.allowed_depth = depth

    def set_alone(self, is_alone: bool) -> None:
        """Whether no other model is loaded that may want its cores."""
        for group in self.engine.groups:
            group.steps.is_alone = is_alone

    def delay_s(self, now: float) -> float:
        """Seconds until `run_round` may have something to do without an event; inf: never."""
        return min([group.steps.delay_s(now) for group in self.engine.groups])

    def wants_cores(self, now: float) -> bool:
        """It has something to compute, and a worker that computes."""
        return self.engine.worker.is_attached and self.engine.has_work(now) and not self.problem

    def claim(self) -> Claim:
        """Its claim to its cores."""
        engine = self.engine
        has_prompts = any(not sequence.outputs for sequence in engine.table.scheduled)
        is_computing = any(group.is_computing for group in self.groups)
        spent_s = engine.stats.worker_s / len(self.groups)  # each has its part of the cores
        return Claim(self.name, self.cores, spent_s, is_computing, has_prompts, self.weight)

    def prepare_sleep(self) -> bool:
        """Before the stage blocks: request doorbells. False: a step is acknowledged already."""
        asleep = [group.prepare_sleep() for group in self.groups]
        return all(asleep)

    def cancel_sleep(self) -> None:
        """The stage is awake: no doorbell is needed."""
        for group in self.groups:
            group.cancel_sleep()

    # -------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """At each tick: deadlines, kv's arena, and the groups."""
        self.engine.tick(now)
        if self.kv is not None and self.kv.error and now >= self._ask_kv_at:
            self._ask_kv_at = now + KV_RETRY_S
            self.attach_kv()
        # Waiting for the worker or kv is reported by `problem`, for this model alone: the stage is not stuck.
        is_waiting = self.engine.is_busy and not self.engine.is_ready
        if self.engine.has_steps or is_waiting or self.engine.rows.batch_wait_s(now) > 0:
            self.progress += 1
        for group in self.groups:
            group.tick(now)
        self._report_attach_failure(now)

    def _report_attach_failure(self, now: float) -> None:
        """End the model's requests if a worker has not been able to attach for seconds, and no other one has served."""
        served_at = max(group.served_at for group in self.groups)
        failures = [self._kv_failure, *(group.attach_failure for group in self.groups)]
        failures = [failure for failure in failures if failure.since >= served_at]
        lasting = [error for failure in failures if (error := failure.lasting(now, self._first_ready_at))]
        failure = self.engine.worker.failure = lasting[0] if lasting else ""
        if failure:
            self.engine.fail_all("MODEL_UNAVAILABLE", f"model {self.name} cannot run: {failure}")

    # -------------------------------------------------------------- state

    @property
    def stalled_s(self) -> float:
        """Seconds since a worker with a step has shown signs of computing it: of the group that stalls the least."""
        return min(group.stalled_s for group in self.groups)

    @property
    def problem(self) -> str:
        """Why the model is not ready; "" when some group is."""
        problems = [self._problem_of(group) for group in self.groups]
        return problems[0] if all(problems) else ""

    @property
    def group_problems(self) -> tuple[str, ...]:
        """Of several worker groups: why each computes nothing, "" for one that is ready. () for a single one."""
        return tuple(self._problem_of(group) for group in self.groups) if len(self.groups) > 1 else ()

    @property
    def waiting_groups(self) -> list[str]:
        """The worker groups that compute nothing while another one does, with the reason."""
        problems = self.group_problems
        if all(problems):  # `problem` has the reason
            return []
        return [f"{stage}: {problem}" for stage, problem in zip(self.group_stages, problems, strict=True) if problem]

    @property
    def attachments(self) -> tuple[int, ...]:
        """Of each worker group that is attached: the generation of its ring."""
        return tuple(group.attachment for group in self.groups if group.is_attached)

    def _problem_of(self, group: GroupRunner) -> str:
        if failure := group.attach_failure.error or self._kv_failure.error:
            return failure
        if not (group.is_attached and self.engine.leases.is_up):
            return group.reason or "waiting for kv"
        if group.stalled_s > STALLED_S:
            return "its worker has a step and does not compute"
        return ""

    def state(self) -> m.ModelState:
        """State for the gateways."""
        kv = self.kv_state
        state = self.engine.state(self.digest, self.problem, kv.free + kv.cached if kv else 0)
        places = [self.places[number] for number in sorted(self.places)]
        ranks, nodes = sum(ranks for ranks, _ in places), tuple(n for _, nodes in places for n in nodes)
        return msgspec.structs.replace(
            state,
            kernels=self.kernels,
            ranks=ranks,
            nodes=nodes,
            attachments=self.attachments,
            groups=self.group_problems,
        )

    def retire(self) -> None:
        """The version is unloaded: refuse its remaining sequences, and detach the workers from the arenas."""
        self.engine.reject_all(Refusal("MODEL_UNAVAILABLE", f"{self.name} has been unloaded", "model", 1.0))
        for group in self.groups:
            group.retire()
        self._pids_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the step arenas; processes that map them keep their mappings."""
        for group in self.groups:
            group.close()
        arenas, self._arenas = self._arenas, []
        if arenas:
            for number in range(len(self.groups)):
                self.engine.set_ring(number, None)
        for arena in arenas:
            arena.close()
            arena.unlink()
