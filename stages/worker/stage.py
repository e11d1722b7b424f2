"""The worker process: rank 0 of a worker group, which leads the other ranks and owns the group's only socket.

    prepare the checkpoint, load kernels -> map the model -> fork the other ranks -> dummy passes -> WorkerReady
      -> Attach: map the arenas -> compute steps as the ring's head moves -> Detach -> WorkerReady ...

Between steps it polls the head counter for `SPIN_NS`, then requests a doorbell and sleeps.  The control socket is read
when no step is published, and under load every `poll_every_ns` or at the end of a step that takes longer.

Of a checkpoint that is still downloaded (arriving_weights.py) the layers of a step are computed as they arrive; then
there are no dummy passes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.faults import points
from pipeline.ipc.doorbell import Ringer
from pipeline.ipc.endpoint import Link
from pipeline.ipc.poll_loop import MAX_WAIT_S, PollLoop
from pipeline.models import store, versions, worker_groups
from pipeline.models.arena_sizes import version_steps_geometry
from pipeline.models.versions import ModelVersion
from pipeline.observe import logs
from pipeline.observe.phase_times import PhaseTimes
from pipeline.protocol import messages as m
from pipeline.runtime.process import AWAITED_VARIABLE, EXIT_FATAL, use_default_time_slice
from shm import memory_nodes, words
from shm import step_ring as sh
from shm.arena import Arena, ArenaError, process_ticks
from shm.checkpoint import Checkpoint, Index
from shm.pages import attach_kv
from shm.step_ring import StepsGeometry
from shm.step_rings import attach_ring
from stages.worker import activations_arena as act
from stages.worker import expected_model, preloading, waiting_ranks
from stages.worker.adapters.loading import load_adapters
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.ahead import Ahead
from stages.worker.arriving_weights import ArrivingWeights, open_arriving
from stages.worker.checkpoint.attention_factor import warn_if_ignored
from stages.worker.checkpoint.prepare import prepare
from stages.worker.checkpoint.weight_copies import CopyPlace, make_copies
from stages.worker.control_polls import next_poll_ns, poll_every_ns
from stages.worker.kernels import amx_verdict, compiled, features
from stages.worker.kernels import parameter_block as pb
from stages.worker.mapped_weights import MAX_MAPPED_BYTES, are_in_memory, can_ask, map_weights
from stages.worker.memory_check import check_memory, is_planned, memory_left
from stages.worker.model import Model
from stages.worker.rank_places import place_ranks
from stages.worker.ranks import (
    ArenaPaths,
    Attachment,
    attach_group,
    attach_ranks,
    pin,
    spawn,
    watch,
)
from stages.worker.stored_failure import stored_failure
from stages.worker.warm_up import try_warm_up

log = logging.getLogger("starling.worker")

PREPARE_S = 3600.0  # longest preparation: a large download, during which heartbeats and progress go on
SPIN_NS = 60_000  # polling of the head counter before sleeping
ARRIVAL_POLL_S = 0.002  # between two checks of the weights that a step waits for; a frame ends it


class WorkerStage:
    """One worker group: the checkpoint, the ranks, the attachment to the scheduler's and kv's arenas."""

    def __init__(self, config: Config, version: ModelVersion) -> None:
        self.config, self.version = config, version
        self.model_config = model_config = version.model
        self.name = version.id
        self.loop = PollLoop(version.stage, config)
        self._attachment: Attachment | None = None
        self._mapped: Attachment | None = None  # before an `Attach`, which makes it the attachment
        self._activations: Arena | None = None
        self._ahead: Ahead | None = None
        self._generation = 0
        self._attach_error = ""  # of the last `Attach`
        self._announced = 0  # number announced to the ranks last: even for a step
        self._fault = points.fault_point("worker", "step")
        self._steps = 0  # number of steps, for the fault plan
        self._next_poll, self._poll_every_ns = 0, poll_every_ns(config.server.heartbeat_ms)
        self._bell = Ringer()
        self._activations_path = paths.arena_dir(config) / f"{version.group_slug}.act"
        self._arena_labels = self.version.name, "activations", "reserved"
        self._phases = PhaseTimes()
        self._arriving: ArrivingWeights | None = None  # None: all weights are here
        groups = worker_groups.cpus_of_groups(config, version.settings, version.name)
        if version.group >= len(groups):
            raise ConfigError(f"{version.group_id}: {version.id} has {len(groups)} groups: restart the worker pool")
        cpus, self._n_groups = worker_groups.allowed(groups[version.group]), len(groups)
        self._n_nodes = len(memory_nodes.of(cpu for some in groups for cpu in some))  # of all groups
        self.n_ranks = model_config.ranks or len(cpus)
        self._places = place_ranks(cpus, self.n_ranks)
        checkpoint, self._index = self._prepare()
        adapters: AdapterMemory | None = None
        self.adapters: dict[str, str] = {}  # digest by name
        if model_config.adapters:
            use_default_time_slice()  # they may have to be ingested
            with self.loop.allow_stall(PREPARE_S):
                adapters, self.adapters = load_adapters(version, checkpoint.index)
        copies = self._copy_weights(checkpoint)
        # What is loaded while the server runs, or by an agent, gets no dummy passes, which a request would wait for.
        self._is_awaited = self._arriving is None and (version.state == "loading" or AWAITED_VARIABLE in os.environ)
        are_there = can_ask(checkpoint.path, checkpoint.info.st_uid) and are_in_memory(checkpoint.data)
        is_small = checkpoint.data.nbytes * self.n_ranks <= MAX_MAPPED_BYTES
        maps = self._is_awaited and is_small and are_there
        cpus, kv_type = self._places.cpus, model_config.kv_type
        is_file = config.performance.use_mmap and self._arriving is None and not copies and adapters is None
        self.ranks = waiting_ranks.take(checkpoint if is_file else None, kv_type, cpus, self.n_ranks, maps)
        link: Link | None = None
        if self.ranks or self.n_ranks == 1:  # nothing is forked any more
            if maps and not copies:  # first: it takes longest
                self._begin_ahead(checkpoint.data[:0] if expected_model.is_mapped(checkpoint) else checkpoint.data)
            link = self._connect()
        models = [Model(checkpoint, adapters, copy) for copy in copies]
        models = models or [expected_model.model_of(checkpoint, adapters)]
        self.model = models[0]  # rank 0's
        self._vocabulary = self.model.index.vocabulary_digest if config.drafts(version.name) else ""
        self._kernels = self.model.load_kernels(kv_type)  # before the fork: all ranks have the same
        self._kernels += f"-{by_tiles}" if (by_tiles := amx_verdict.choice()) else ""
        for rank in range(1, self.n_ranks) if link is None else ():
            model = models[self._places.node_of(rank) if copies else 0]
            self.ranks.append(spawn(model, rank, self.n_ranks, cpus, maps))
        self.link = link or self._connect()  # ZeroMQ's threads begin before `pin`, which pins this thread alone
        if self.ranks:
            watch(self.ranks)
        if self._is_awaited:
            self._read_weights(are_there)
            self._begin_ahead(self.model.weights if is_small else self.model.weights[:0])

    def _finish_start(self) -> None:
        """What the scheduler's greeting need not wait for."""
        logs.start_writing()
        if self.version.group == 0 and not self._index.hyper.is_factor_read:  # of an older release: others cost nothing
            asked = self.model_config, paths.models_dir() / f"{self._index.digest}.idx"
            threading.Thread(target=warn_if_ignored, args=asked, name="attention-factor", daemon=True).start()
        pin(self._places.cpus, 0, self.n_ranks)
        self._warm_up()
        self._phases.end()
        for phase, seconds in self._phases.seconds.items() if self.version.group == 0 else ():  # groups would add up
            self.loop.metrics.set("starling_model_load_seconds", seconds, self.version.name, phase)

    def _begin_ahead(self, weights: np.ndarray) -> None:
        if self._ahead is None:
            steps = version_steps_geometry(self.config, self.model_config, self.version.name, self._index.hyper)
            self._ahead = Ahead(self._geometry(steps), self._create_activations, weights)

    def _connect(self) -> Link:
        link = self.loop.connect("scheduler-worker", self._on_frame)
        link.on_up, link.on_down = self._on_scheduler, lambda hello: self._detach()
        return link

    def _prepare(self) -> tuple[Checkpoint, Index]:
        """Fetch, ingest and compile whatever is missing; returns the verified checkpoint and its index."""
        self._phases.enter("open")
        progress = self._report_preparation
        with self.loop.allow_stall(PREPARE_S):
            allowed, folder = self.config.registry.sources, paths.models_dir()
            planned, found = is_planned(self.version, folder), versions.find_index(self.version, folder)
            waiting_ranks.begin_version(found)
            if found is None:  # what ingests it begins with the slice of this one
                use_default_time_slice()
            index_path = prepare(self.model_config, folder, progress, self.version.digest, allowed)
            if not planned:
                check_memory(self.config, self.version)
            store.mark_used(index_path.stem, folder)
            if (opened := open_arriving(index_path)) is not None:
                checkpoint, self._arriving = opened
                log.info("weights are still downloaded", extra={"model": self.name})
            else:
                checkpoint = expected_model.open_verified(index_path, progress, self.config)
            return checkpoint, checkpoint.index

    def _copy_weights(self, checkpoint: Checkpoint) -> list[np.ndarray]:
        """The weights of each memory node of the group; [] if all ranks use those of the checkpoint."""
        places, setting = self._places, self.config.performance.weight_copies
        node_cpus, n_nodes = places.node_cpus, len(places.nodes)
        if self._n_groups > 1 and self.n_ranks <= len(places.cpus):  # the file's pages are on the node of any of them
            node_cpus, n_nodes = node_cpus or [places.cpus[: self.n_ranks]], self._n_nodes
        copies: list[np.ndarray] = []
        # Without all weights there is nothing to copy yet: the ranks use the file until the group starts again.
        if self._arriving is None:
            place = CopyPlace(paths.run_dir(self.config), self.version.stage, node_cpus, n_nodes)
            left = partial(memory_left, self.config, self.version)
            with self.loop.allow_stall(PREPARE_S):
                copies = make_copies(place, setting, self.name, checkpoint, left, self._report_preparation)
        self._phases.enter("start ranks")
        return copies

    def _report_preparation(self, phase: str, done: int, total: int) -> None:
        self.loop.tick()
        if self._phases.enter(phase):
            use_default_time_slice()  # others need not wait for what takes so long
            self.loop.reason = f"preparing {self.name}: {phase}"
            log.info("preparing", extra={"model": self.name, "phase": phase})

    def _read_weights(self, are_there: bool) -> None:
        """Before the group is ready: a step that waits for a slow disk would count as stuck."""
        if not are_there:
            self._phases.enter("read weights")
            use_default_time_slice()
            self.loop.reason = f"reading the weights of {self.name}"
            with self.loop.allow_stall(PREPARE_S):
                map_weights(self.model.weights, self._go_on)

    def _go_on(self) -> bool:
        """Report progress; False when the stage is stopping."""
        self.loop.report_progress()
        return not self.loop.stopping

    def _warm_up(self) -> None:
        """Dummy passes, so that the first request finds the weights mapped; without them it is only slower.

        Where a request or a self-test waits for the version, that computes what they would.
        """
        if self._arriving is not None or self._is_awaited:
            return  # without all weights they would end when the last ones have arrived
        self._phases.enter("warm up")
        use_default_time_slice()
        self.loop.reason = f"warming up {self.name}"
        with self.loop.allow_stall(PREPARE_S):  # the weights may have to be read from a slow disk
            waiting_ranks.await_ready()
            try_warm_up(self.model, self.ranks, self._places, self.model_config, self._activations_path)

    # -------------------------------------------------------------- frames of the scheduler

    def _on_scheduler(self, hello: m.Hello) -> None:
        """A scheduler has connected, perhaps a new one: release the arenas of the previous one."""
        if self._mapped is None or not self._mapped.is_current:
            self._detach()
        self._send_ready()

    def _geometry(self, steps: StepsGeometry) -> act.ActivationsGeometry:
        rank = self.model_config.max_adapter_rank if self.model_config.adapters else 0
        step_tokens, n_nodes = self.config.scheduler.max_step_tokens, max(1, len(self._places.nodes))
        return act.geometry_for(steps, self._index.hyper, step_tokens, self.n_ranks, rank, n_nodes)

    def _create_activations(self, geometry: act.ActivationsGeometry) -> Arena:
        act.check_size(geometry, self._index.hyper, self.config.performance.memory_pool_size_mb, self.name)
        path, node_cpus = self._activations_path, self._places.node_cpus
        digest = bytes.fromhex(self._index.digest)
        return act.create_activations(path, geometry, self._index.hyper, digest, node_cpus)

    def _send_ready(self, error: str = "") -> None:
        h, own = self.model.hyper, (os.getpid(), process_ticks(os.getpid()))
        pids = own, *((rank.pid, rank.ticks) for rank in self.ranks)
        ids = self.name, self.model.index.digest, self.link.epoch, self.n_ranks, pids
        common = h.vocab_size, h.context_length, features.isa(), self._vocabulary, error
        of_model = h.width, h.is_causal, tuple(self.adapters.items()), h.kv_window, h.page_groups
        of_group = self._kernels, self._places.nodes, self.version.group
        self.link.send(m.WorkerReady(*(ids + common + of_model + of_group)))

    def _on_frame(self, frame: m.Frame) -> None:
        if isinstance(frame, m.Attach):
            if self._mapped is None:
                self._detach()
            try:
                self._attach(frame)
            except (ArenaError, OSError, ValueError) as error:
                # The arena may be of an older generation: the scheduler attaches again after WorkerReady.
                if str(error) != self._attach_error:
                    log.error("cannot attach", extra={"model": self.name, "reason": str(error)})
                self._attach_error = str(error)
                self._detach()
                self._send_ready(self._attach_error)
            else:
                self._attach_error = ""
        elif isinstance(frame, m.Detach) and frame.generation == self._generation:
            self._detach()
            self._send_ready()

    def _attach(self, frame: m.Attach) -> None:
        """Attach every rank to the arenas, unless they have mapped them, then acknowledge the generation."""
        self._attachment = self._take_mapped(frame) or self._map_arenas(frame.steps_path, frame.kv_path)
        self._generation = frame.generation
        self._bell.connect(frame.doorbell)
        words.store(self._attachment.steps.control, sh.WORKER_GENERATION, frame.generation)
        log.info("attached", extra={"model": self.name, "generation": frame.generation})

    def _map_ahead(self) -> None:
        """Map the arenas that scheduler and kv have made: `Attach` names them, unless they are replaced."""
        if self._attachment is None and self._mapped is None:
            base = f"{paths.arena_dir(self.config)}/{self.version.slug}"
            with contextlib.suppress(ArenaError, OSError, ValueError):  # `Attach` reports it
                self._mapped = self._map_arenas(f"{base}.steps", f"{base}.kv")

    def _take_mapped(self, frame: m.Attach) -> Attachment | None:
        """What `_map_ahead` has mapped, if that is what the frame names; else it is released."""
        mapped, named = self._mapped, (frame.steps_path, frame.kv_path)
        if mapped is not None and (named != (mapped.paths.steps, mapped.paths.kv) or not mapped.is_current):
            self._detach()
        mapped, self._mapped = self._mapped, None
        return mapped

    def _map_arenas(self, steps_path: str, kv_path: str) -> Attachment:
        """Create the activations arena, and attach every rank to the arenas."""
        steps_arenas, _, s = attach_ring(Path(steps_path), self.version.group, self.model.digest)
        for arena in steps_arenas:
            arena.close()
        kv_arena, _, _ = attach_kv(Path(kv_path), self.model.digest)
        kv_arena.close()
        geometry = self._geometry(s)
        made = self._ahead.take(geometry) if self._ahead is not None else None
        self._activations = made or self._create_activations(geometry)
        self.loop.metrics.set("starling_arena_bytes", self._activations.size, *self._arena_labels)
        act.set_up(act.control_words(self._activations), self.n_ranks, self._places.clusters, self._places.nodes)
        self._announced = 0
        arena_paths = ArenaPaths(steps_path, kv_path, str(self._activations_path), self.version.group)
        return attach_group(self.model, self.ranks, arena_paths, self._activations, self._await_ready)

    def _await_ready(self) -> None:
        with self.loop.allow_stall(PREPARE_S):  # they may have to read kernels or the index from a slow disk
            waiting_ranks.await_ready()

    def _detach(self) -> None:
        """Release the arenas in all ranks. Idempotent."""
        attachment, self._attachment, self._mapped = self._attachment or self._mapped, None, None
        if attachment is not None:
            act.announce(attachment.words, self._announced + 1, self.n_ranks)
            attach_ranks(self.ranks, ArenaPaths())
            attachment.close()
        if self._activations is not None:
            self._activations.close()
            self._activations.unlink()
            self._activations = None
            self.loop.metrics.set("starling_arena_bytes", 0, *self._arena_labels)
        self._generation = 0

    # -------------------------------------------------------------- steps

    def run(self) -> int:
        """Compute steps until the stage is stopped; returns the exit code."""
        loop = self.loop
        try:
            if self._is_awaited:
                loop.poll(0.0)  # if the scheduler has greeted, it waits for `WorkerReady`
            self._finish_start()
            if self._is_awaited:
                self._map_ahead()  # while the scheduler answers
                loop.poll(0.0)  # likewise for the answer to `Attach`, before a tick
            use_default_time_slice()
            loop.ready, loop.reason = True, ""
            while not (loop.ended or self._is_drained()):
                if not self._compute():
                    self._sleep()
        finally:
            self._detach()
            if self._ahead is not None:
                self._ahead.close()
            self._bell.close()
            loop.close()
        return loop.exit_code

    def _is_drained(self) -> bool:
        """Whether the stage is stopping and no scheduler needs the group any more, or the drain time is over."""
        if not self.loop.stopping:
            return False
        self.loop.busy = self._attachment is not None and self.link.peer is not None
        return self.loop.drained

    def _compute(self) -> bool:
        """Compute the published steps, if there is one within the time of a spin. Returns whether there was."""
        attachment = self._attachment
        if attachment is None:
            return False
        control, base = attachment.steps.control, attachment.ring
        step = int(control[sh.DONE]) + 1
        if not compiled.wait_for_head(base, step, 0 if self.loop.is_idle else SPIN_NS):
            return False
        self.loop.busy = True
        if self.loop.is_idle:
            self.loop.mark_active()
        self._next_poll = next_poll_ns(now := time.monotonic_ns(), self._next_poll, self.loop.stopping)
        limit_ns = max(0, self._next_poll - now)
        if self._fault.trigger is not None:
            limit_ns = 0  # return to Python after each step
            self._steps += 1
            self._fault.trigger(self._steps)
        if self._arriving is not None:
            if not self._compute_arriving(attachment, step, self._arriving):
                return True  # to look at once whether there is another attachment
            limit_ns = 0  # the last part is computed alone
        self._announced += 2
        began = time.monotonic_ns()
        of_step = attachment.table.address, attachment.control, self._announced, step, attachment.timing
        refused = compiled.run_steps(*of_step, limit_ns, base, self._bell.connected_fd)
        attachment.table.table[pb.FIRST_LAYER] = 0
        done = int(control[sh.DONE])
        self._announced += 2 * (done - step)
        if 0 < control[sh.WAKE_AT] <= done and not self._bell.ring():  # a frame instead of pipeline/ipc/doorbell.py
            self.link.send(m.StepDone(self._generation, done))
        if refused:
            facts = {"model": self.name, "generation": self._generation, "step": done, "entries": refused}
            log.error("entries of a step were refused", extra=facts)
        self.loop.progress = int(control[sh.PROGRESS])
        now = time.monotonic_ns()
        if log.isEnabledFor(logging.DEBUG):
            steps = {"generation": self._generation, "first": step, "last": done}  # whose: "requests of steps"
            took_ms = (now - began) / 1e6
            log.debug("steps are computed", extra={"model": self.name, **steps, "duration_ms": took_ms})
        if now >= self._next_poll:
            self._next_poll = now + self._poll_every_ns
            self.loop.poll(0)
        return True

    def _compute_arriving(self, attachment: Attachment, step: int, arriving: ArrivingWeights) -> bool:
        """Compute the layers of a step as their weights arrive, and leave its last part.

        Frames, signals and ticks are handled meanwhile, between two parts, when all ranks have passed a barrier. False
        if the step is given up, because the group is attached to other arenas, or to none, or the stage ends: what it
        has computed does not count, and the arenas may be unmapped.
        Raises `ModelUnavailable` if the download ends without the weights.
        """
        done, most = 0, self.model.hyper.n_layers - 1  # the last part has a layer, and all that follows the layers
        table, control = attachment.table, attachment.steps.control
        while not arriving.is_complete:
            arriving.check()
            end, wait_s = min(arriving.n_layers, most), ARRIVAL_POLL_S
            if end > done:
                if not done:
                    log.info("layers are computed as they arrive", extra={"model": self.name, "layers": end})
                table.table[pb.FIRST_LAYER], table.table[pb.END_LAYER] = done, end
                self._announced += 2
                refused = compiled.run_steps(
                    table.address, attachment.control, self._announced, step, attachment.timing, 0, 0, -1
                )
                if refused:  # only the first part, which plans the step, reports them
                    log.error("entries of a step were refused", extra={"model": self.name, "entries": refused})
                # The parameter block names no part but while one is computed: a step that is given up leaves none.
                table.table[pb.FIRST_LAYER] = table.table[pb.END_LAYER] = 0
                done, wait_s = end, 0.0
            # The scheduler must not take the wait for a stuck step, nor the other stages for the end of this one.
            words.store(control, sh.PROGRESS, words.load(control, sh.PROGRESS) + 1)
            self.loop.report_progress()
            self.loop.poll(wait_s)
            if self._attachment is not attachment or self.loop.ended or self._is_drained():
                log.info("a step that waits for weights is given up", extra={"model": self.name, "layers": done})
                return False
        log.info("all weights have arrived", extra={"model": self.name, "layers_before": done})
        arriving.close()
        self._arriving = None
        table.table[pb.FIRST_LAYER], table.table[pb.END_LAYER] = done, 0
        return True

    def _sleep(self) -> None:
        """Sleep until a doorbell, a frame or the next tick."""
        loop, attachment = self.loop, self._attachment
        loop.busy = False
        if attachment is None:
            loop.poll(MAX_WAIT_S)
            return
        control = attachment.steps.control
        words.store(control, sh.WORKER_SLEEPING, 1)
        words.fence()
        try:
            if words.load(control, sh.HEAD) == words.load(control, sh.DONE):
                loop.poll(MAX_WAIT_S)
        finally:
            words.store(control, sh.WORKER_SLEEPING, 0)


preload = preloading.preload  # before the stage is forked
prepare_spare = waiting_ranks.prepare_spare  # in the process of a spare worker group, before it waits


def main(config: Config, version_id: str = "") -> int:
    """Run until stopped; returns the exit code. `version_id`: `ModelVersion.group_id`; default: the first version."""
    table = versions.read(config)
    chosen = table.find_group(version_id) if version_id else next(iter(table.versions), None)
    if chosen is None:
        raise ConfigError(f"no model {version_id!r} is configured", param="models")
    try:
        with stored_failure(paths.run_dir(config), chosen.stage) as forget_failure:
            stage = WorkerStage(config, chosen)
            forget_failure()
            return stage.run()
    except RuntimeError:
        log.exception("the worker group ends")
        return EXIT_FATAL
