"""The scheduler process: its sockets, and the loop over the engines of all model versions.

One round: process the frames that peers have sent, complete and publish steps of every version (its worker waits for
nothing else), then send the frames for kv and the gateways.  Before the loop blocks it requests a doorbell from every
busy worker and checks once more for acknowledged steps, so that no wake-up is lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import deque
from pathlib import Path

import msgspec

from pipeline.config import paths, server_cores
from pipeline.config.schema import Config
from pipeline.files import temporary_path
from pipeline.ipc.doorbell import Doorbell
from pipeline.ipc.liveness import IDLE_INTERVALS
from pipeline.ipc.poll_loop import PollLoop
from pipeline.models import versions, worker_groups
from pipeline.models.arena_sizes import max_draft_sequences
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from pipeline.runtime import process
from shm.arena import remove_stale_arenas
from shm.checkpoint import Index
from stages.scheduler.constraints.helper_processes import ConstraintHelpers
from stages.scheduler.core.outbox import rejected_frame
from stages.scheduler.core.rounds import Rounds
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.version_runner import GROUPS_SUFFIX, VersionRunner
from stages.scheduler.draft.pairing import DraftPairs
from stages.scheduler.index_reader import IndexReader
from stages.scheduler.metrics import INTERVAL_S, ModelMetrics, TenantMetrics
from stages.scheduler.policy.admission import Refusal

log = logging.getLogger("starling.scheduler")

MAX_UNSENT = 65_536  # frames kept for a gateway that does not read; with more its sequences are detached


class SchedulerStage:
    """The stage. One `VersionRunner` for each loaded version."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.loop = PollLoop("scheduler", config)
        self.gateways = self.loop.bind("gateway-scheduler", self._on_gateway)
        self.gateways.on_up = self._gateway_up
        self.gateways.on_down = self._gateway_down
        self.workers = self.loop.bind("scheduler-worker", self._on_worker)
        self.workers.on_down = self._worker_down
        self.kv = self.loop.connect("scheduler-kv", self._on_kv)
        self.kv.on_up = lambda hello: self._kv_up()
        self.kv.on_down = lambda hello: self._kv_down()
        self.loop.on_tick.append(self._tick)
        self._clock = time.monotonic
        self._unsent: dict[bytes, deque[m.Frame]] = {}  # by gateway
        self._next_push = 0.0
        self.runners: dict[str, VersionRunner] = {}  # by version
        # (version, digest, problem, those of its groups, their attachments) as gateways have them
        self._pushed: list[tuple[str, str, str, tuple[str, ...], tuple[int, ...]]] = []
        self._serving: set[str] = set()  # versions that must be ready for this stage to be ready
        self._doorbells: dict[str, Doorbell] = {}  # by version
        self._pairs = DraftPairs()
        self._rounds = Rounds(self.runners, self._pairs, self._send_outbox)
        self._metrics: dict[str, ModelMetrics] = {}  # by model
        self._tenant_metrics = TenantMetrics()
        self._next_export = 0.0
        self.helpers = ConstraintHelpers(
            config, self.loop, lambda: [runner.engine.constraints for runner in self.runners.values()]
        )
        server_cores.store(config)  # before anything is decided by the number of worker groups
        self.follower = versions.VersionFollower(config)
        self._indexes = IndexReader(paths.models_dir(), self.loop.wake)
        self._changes = -1  # readable when the record of versions has changed
        with contextlib.suppress(OSError):  # the number of watches per user is limited: ticks find the change
            self._changes = process.open_touch_watch(versions.bell_path(config))
            self.loop.add_fd(self._changes, self._on_change)
        self._remove_stale_files()
        self._follow()

    # -------------------------------------------------------------- loaded versions

    def _follow(self) -> None:
        """Add and remove runners so that they match the record of model versions."""
        self.loop.mark_active()
        wanted = {version.id: version for version in self.follower.table.versions}
        for name in [name for name in self.runners if name not in wanted]:
            self._remove(name)
        for version in wanted.values():
            if version.id not in self.runners:
                self._add(version)
        self._serving = {version.id for version in wanted.values() if version.state == "serving"}
        self._pairs.update(self.follower.table, self.runners)

    def _on_change(self) -> None:
        os.read(self._changes, 65536)
        if self.follower.poll():
            self._follow()

    def _find(self, name: str) -> VersionRunner | None:
        """The runner of a version. The record of versions is read again if the name is unknown."""
        runner = self.runners.get(name)
        if runner is None and self.follower.poll():
            self._follow()
            runner = self.runners.get(name)
        return runner

    def _add(self, version: ModelVersion) -> None:
        runner = self._make_runner(version, self._clock())
        # A version of a prepared model is loaded: its arenas need not wait for its worker.
        if version.state == "loading" and version.digest and not runner.steps_path.exists():
            self._indexes.begin(version)
        bell = Doorbell(paths.run_dir(self.config) / f"bell-{version.slug}.sock")
        runner.doorbell = bell.path
        if bell.fd >= 0:
            self.loop.add_fd(bell.fd, bell.drain)
        self.runners[version.id] = runner
        self._doorbells[version.id] = bell
        metrics = self._metrics.setdefault(version.name, ModelMetrics(version.name))
        metrics.engines[version.id] = runner.engine

    def _create_ahead(self) -> None:
        """An index has been read: create the arena of its version."""
        read = self._indexes.take()
        runner = self.runners.get(read[0]) if read is not None else None
        if read is not None and runner is not None:
            runner.create_ahead(read[1])

    def _remove(self, name: str) -> None:
        """The gateway has unloaded the version. Its supervisor ends the worker group."""
        runner = self.runners.pop(name)
        runner.retire()
        self._send_output(runner)
        for metrics in self._metrics.values():
            metrics.remove(name)
        self._tenant_metrics.remove(runner.engine)
        model = name.partition("@")[0]
        for stage in runner.group_stages:
            self.loop.metrics.drop("starling_worker_group_ready", model, stage)
        self.helpers.forget(name)
        bell = self._doorbells.pop(name)
        if bell.fd >= 0:
            self.loop.remove_fd(bell.fd)
        bell.close()
        runner.close()
        log.info("model version unloaded", extra={"version": name})

    def _remove_stale_files(self) -> None:
        """Files of earlier processes of this stage, for versions that have been unloaded since."""
        wanted = {version.slug for version in self.follower.table.versions}
        loaded = self.follower.table.versions
        slugs = {group.group_slug for version in loaded for group in worker_groups.of_version(self.config, version)}
        remove_stale_arenas(paths.arena_dir(self.config), "steps", slugs)
        remove_stale_arenas(paths.arena_dir(self.config), GROUPS_SUFFIX, wanted)
        for pattern in ("bell-*.sock", "vocabulary-*.msgpack"):
            for path in paths.run_dir(self.config).glob(pattern):
                if path.stem.partition("-")[2] not in wanted:
                    path.unlink(missing_ok=True)
        for path in paths.run_dir(self.config).glob(temporary_path(Path("vocabulary-*.msgpack")).name):
            path.unlink(missing_ok=True)  # of a process that was killed while it wrote

    def _make_runner(self, version: ModelVersion, now: float) -> VersionRunner:
        c, s = self.config, self.config.scheduler
        model = version.model
        settings = Settings(
            model=model.name,
            max_batch_size=c.max_batch_size(model),
            max_queue_depth=s.max_queue_depth,
            max_tenant_depth=c.rate_limits.max_queue_depth,
            max_step_tokens=s.max_step_tokens,
            max_prompt_tokens=s.max_prompt_tokens,
            max_output_tokens=s.max_output_tokens,
            batch_timeout_s=s.batch_timeout_ms / 1000,
            speculate=model.speculate,
            max_draft_sequences=max_draft_sequences(c, version.name),
            prefix_cache=c.cache.enabled,
            worker_groups=worker_groups.count(c, version.settings, version.name),
        )
        runner = VersionRunner(
            settings,
            paths.arena_dir(c) / f"{model.slug}.steps",
            model.page_tokens,
            model.max_sequence_length,
            s.stuck_step_ms / 1000,
            now,
            c.tenant_weight,
            self.workers.send,
            self.kv.send,
            self.helpers.vetting,
        )
        runner.cores, runner.weight = frozenset(model.cpus), model.weight
        runner.group_stages = tuple(version.of_group(number).stage for number in range(len(runner.groups)))
        return runner

    def run(self) -> int:
        """Run until SIGTERM or SIGINT; returns the exit code."""
        try:
            return self.loop.run(self.work)
        finally:
            self.helpers.close()
            for runner in self.runners.values():
                runner.close()
            for bell in self._doorbells.values():
                bell.close()
            if self._changes >= 0:
                os.close(self._changes)

    # -------------------------------------------------------------- the round

    def work(self) -> float | None:
        """One round; returns the seconds until the next one is due without an event (None: never)."""
        self._create_ahead()
        runners = self.runners.values()
        for runner in runners:
            runner.cancel_sleep()
        while True:
            now = self._clock()
            self._rounds.run(now)
            has_new_work = [runner for runner in runners if runner.engine.drafts.take_new_work()]
            if has_new_work:  # a draft model may have had its round before its target asked it
                self._rounds.run(now)
            for runner in runners:
                self._send_output(runner)
            self.helpers.send()
            asleep = [runner.prepare_sleep() for runner in runners]
            if all(asleep):
                break
        # A worker in a long step and a kv that moves pages for it are this stage's progress, too.
        kv = self.kv.last_heartbeat
        self.loop.progress = (kv.progress if kv is not None else 0) + sum(
            runner.engine.stats.steps + runner.engine.stats.submitted + runner.progress for runner in runners
        )
        if not self.loop.ready and not self.loop.stopping:
            self._update_readiness(now)  # a worker may have been attached: not only at the next tick
        is_busy = any(runner.engine.is_busy for runner in runners)
        self.loop.busy = self.loop.serves_stopping_clients(self.gateways) if self.loop.stopping else is_busy
        delay_s = min((runner.delay_s(now) for runner in runners), default=math.inf)
        return None if delay_s == math.inf else delay_s

    def _send_output(self, runner: VersionRunner) -> None:
        """Send the engine's frames to kv and the gateways."""
        engine = runner.engine
        if frames := engine.leases.frames:
            # While kv does not read them they stay, in order: a lost request would be waited for without end.
            unsent = next((number for number, frame in enumerate(frames) if not self.kv.send(frame)), len(frames))
            del frames[:unsent]
            if frames:
                self.loop.mark_active()  # ticks send the rest
        self._send_outbox(runner)

    def _send_outbox(self, runner: VersionRunner) -> None:
        """Send the engine's frames to the gateways; those to kv wait for the end of the round, which wakes it once."""
        outbox = runner.engine.outbox
        if outbox.tokens or outbox.started or outbox.flush_events or (outbox.pooled and outbox.events):
            self._send_tokens(runner)
        if outbox.rejected:
            for gateway, rejected in outbox.rejected:
                self._send_gateway(gateway, rejected)
            outbox.rejected.clear()
        if outbox.pooled:
            for gateway, pooled in outbox.pooled:
                self._send_gateway(gateway, pooled)
            outbox.pooled.clear()

    def _send_tokens(self, runner: VersionRunner) -> None:
        outbox, step = runner.engine.outbox, runner.engine.stats.steps
        started, outbox.started = outbox.started, {}
        tokens, outbox.tokens = outbox.tokens, {}
        if not outbox.events:
            for gateway in tokens | started if started else tokens:
                names = tuple(started.get(gateway, ()))
                self._send_gateway(gateway, m.Tokens(runner.name, step, tokens.get(gateway, []), names))
            return
        events, outbox.events, outbox.flush_events = outbox.events, {}, False
        for gateway in tokens | started | events:
            frame = m.Tokens(
                runner.name,
                step,
                tokens.get(gateway, []),
                tuple(started.get(gateway, ())),
                tuple(events.get(gateway, ())),
                self._clock(),
            )
            self._send_gateway(gateway, frame)

    def _send_gateway(self, gateway: bytes, frame: m.Frame) -> None:
        """Frames to a gateway keep their order. Those that it does not read are kept, up to a bound."""
        unsent = self._unsent.get(gateway)
        if not unsent and self.gateways.send(gateway, frame):
            return
        if gateway not in self.gateways.peers:
            return
        if unsent is None:
            unsent = self._unsent[gateway] = deque()
            self.loop.mark_active()  # ticks send the rest
        unsent.append(frame)
        if len(unsent) > MAX_UNSENT:
            log.error("a gateway does not read its frames; its sequences are detached", extra={"unsent": len(unsent)})
            self._gateway_lost(gateway)

    def _tick(self) -> None:
        now = self._clock()
        if self.follower.poll():
            self._follow()
        for gateway, unsent in list(self._unsent.items()):
            while unsent and self.gateways.send(gateway, unsent[0]):
                unsent.popleft()
            if not unsent:
                del self._unsent[gateway]
        for runner in self.runners.values():
            runner.tick(now)
            outbox = runner.engine.outbox
            outbox.flush_events = bool(outbox.events)
        self.helpers.tick(now)
        self._update_readiness(now)
        if now >= self._next_export:
            self._next_export = now + INTERVAL_S
            for metrics in self._metrics.values():
                metrics.export(self.loop.metrics)
            for name, metrics in self._metrics.items():
                sizes = [runner.arena_bytes for id, runner in self.runners.items() if id in metrics.engines]
                ready = [
                    (one.group_stages[number], not problem)
                    for id, one in self.runners.items()
                    if id in metrics.engines
                    for number, problem in enumerate(one.group_problems)
                ]
                for stage, is_ready in ready:
                    self.loop.metrics.set("starling_worker_group_ready", float(is_ready), name, stage)
                for i, state in enumerate(("reserved", "used")):
                    self.loop.metrics.set("starling_arena_bytes", sum(size[i] for size in sizes), name, "steps", state)
            late = sum(metrics.late for metrics in self._metrics.values())
            self.loop.metrics.set("starling_late_frames_total", late, "scheduler")
            engines = [runner.engine for runner in self.runners.values()]
            self._tenant_metrics.export(self.loop.metrics, engines)

    @property
    def _is_steady(self) -> bool:
        """No request waits, and nothing of the runners is under way that ticks continue."""
        runners = self.runners.values()
        return not self._unsent and not any(
            runner.problem
            or any(runner.group_problems)
            or runner.engine.queues.depth
            or runner.engine.constraints.is_used
            or any(group.stalled_s for group in runner.groups)  # ticks decide whether it computes
            for runner in runners
        )

    def _update_readiness(self, now: float) -> None:
        was_steady, self.loop.is_steady = self.loop.is_steady, self._is_steady
        if was_steady and not self.loop.is_steady:
            self.loop.mark_active()  # the next tick continues what has begun, such as a fence
        problems = {name: runner.problem for name, runner in self.runners.items()}
        waiting = [f"{name}: {problem}" for name, problem in problems.items() if problem and name in self._serving]
        # The stage is ready if any serving version is: the state of each version says which ones are not.
        self.loop.ready = len(waiting) < max(1, len(self._serving))
        serving = [runner for name, runner in self.runners.items() if name in self._serving]
        self.loop.reason = "; ".join([*waiting, *(group for runner in serving for group in runner.waiting_groups)])
        current = [
            (name, runner.digest, problems[name], runner.group_problems, runner.attachments)
            for name, runner in self.runners.items()
        ]
        if now >= self._next_push or current != self._pushed:
            intervals = IDLE_INTERVALS if self.loop.is_idle else 2 if self.loop.is_steady else 1
            self._next_push = now + 0.9 * intervals * self.config.server.heartbeat_ms / 1000
            self._pushed = current
            self._push_state(list(self.gateways.peers))

    # -------------------------------------------------------------- gateways

    def _on_gateway(self, peer: bytes, frame: m.Frame) -> None:
        if isinstance(frame, m.Submit):
            runner = self._find(frame.model)
            if runner is None:
                known = ", ".join(self.runners)
                refusal = Refusal("MODEL_NOT_FOUND", f"no model {frame.model!r}; loaded: {known}", "model")
                self._send_gateway(peer, rejected_frame(frame.sequence, refusal))
            else:
                runner.engine.submissions.submit(peer, frame, self._clock())
        elif isinstance(frame, m.Cancel):
            for runner in self.runners.values():
                if frame.sequence in runner.engine.table.live or runner.engine.constraints.is_held(frame.sequence):
                    runner.engine.submissions.cancel(frame)
        elif isinstance(frame, m.ModelVocabulary):
            runner = self._find(frame.model)
            if runner is not None:
                self._store_vocabulary(runner, frame)

    def _store_vocabulary(self, runner: VersionRunner, frame: m.ModelVocabulary) -> None:
        path = paths.run_dir(self.config) / f"vocabulary-{runner.steps_path.stem}.msgpack"
        self.helpers.add_vocabulary(frame, path, runner.engine.constraints)

    def _push_state(self, peers: list[bytes]) -> None:
        if peers:
            state = m.SchedulerState([runner.state() for runner in self.runners.values()])
            for peer in peers:
                self._send_gateway(peer, state)

    def _gateway_up(self, peer: bytes, hello: m.Hello) -> None:
        self._push_state([peer])

    def _gateway_down(self, peer: bytes, hello: m.Hello) -> None:
        self._gateway_lost(peer)

    def _gateway_lost(self, peer: bytes) -> None:
        self._unsent.pop(peer, None)
        for runner in self.runners.values():
            runner.engine.table.detach_gateway(peer, self._clock())

    # -------------------------------------------------------------- workers

    def _on_worker(self, peer: bytes, frame: m.Frame) -> None:
        # `StepDone` needs no handling: it wakes the loop, and the ring contains what is done.
        if isinstance(frame, m.WorkerReady):
            runner = self._find(frame.model)
            if runner is None:
                log.info("worker of a model version that is not loaded", extra={"model": frame.model})
            else:
                runner.worker_ready(peer, self.workers.peers[peer], frame, self._clock())
                self._pairs.update(self.follower.table, self.runners)
                self._update_readiness(self._clock())  # requests may wait for it

    def _worker_down(self, peer: bytes, hello: m.Hello) -> None:
        for runner in self.runners.values():
            runner.worker_down(peer, self._clock())
        self._update_readiness(self._clock())

    # -------------------------------------------------------------- kv

    def _kv_up(self) -> None:
        for runner in self.runners.values():
            runner.attach_kv()

    def _kv_down(self) -> None:
        for runner in self.runners.values():
            runner.kv_down()
        self._update_readiness(self._clock())

    def _on_kv(self, frame: m.Frame) -> None:
        runner = self.runners.get(getattr(frame, "model", ""))
        if runner is None:
            return  # a late answer for an unloaded version
        if isinstance(frame, m.Granted):
            runner.engine.outbox.now = self._clock()
            runner.engine.pages.granted(frame)
        elif isinstance(frame, m.Denied):
            runner.engine.pages.denied(frame)
        elif isinstance(frame, m.KvReady):
            runner.kv_ready(frame, self._clock())
            self._update_readiness(self._clock())
        elif isinstance(frame, m.KvState):
            runner.kv_state = frame
            runner.engine.pages.kv_state(frame)


def preload(config: Config) -> None:
    """Make what decodes an index before the stage is forked. Reads no model: its disk may hang."""
    versions.read(config)
    msgspec.msgpack.Decoder(Index)


def main(config: Config) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    return SchedulerStage(config).run()
