"""The scheduler process: its sockets, and the loop that moves every model's engine.

One round: take in what the peers have sent, then for each model complete and publish (the worker waits
for nothing else), then tell kv and the gateways.  Before it blocks it asks every busy worker for a
doorbell and looks once more at what has been acknowledged, so that no wake-up is lost.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque

from pipeline import messages as m
from pipeline import paths
from pipeline.bell import Bell
from pipeline.config import Config
from pipeline.config_schema import ModelConfig
from pipeline.loop import StageLoop
from pipeline.wire import QUIET_BEATS
from stages.scheduler.admission import Refusal
from stages.scheduler.engine import Settings
from stages.scheduler.host import Host
from stages.scheduler.metrics import INTERVAL_S, Gauge, show_tenants
from stages.scheduler.roster import rejection

log = logging.getLogger("starling.scheduler")

ASK_BITS = 40  # ids of asks to kv: the model's number above them, a count below
MAX_UNSENT = 65_536  # frames kept for a gateway that does not read; beyond, it is given up
HEAR_S = 0.5  # after SIGTERM: how long until the gateways' heartbeats say whether they stop too


class SchedulerStage:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.loop = StageLoop("scheduler", config)
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
        self._unsent: dict[bytes, deque[m.Frame]] = {}
        self._stopping_since = math.inf
        self._next_push = 0.0
        now = self._clock()
        self.hosts = {model.name: self._host(i, model, now) for i, model in enumerate(config.models)}
        self._gauges = [Gauge(name, host.engine) for name, host in self.hosts.items()]
        self._next_show = 0.0

    def _host(self, index: int, model: ModelConfig, now: float) -> Host:
        c, s = self.config, self.config.scheduler
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
            prefix_cache=c.cache.enabled,
            first_ask=(index << ASK_BITS) + 1,
        )
        return Host(
            settings, paths.arena_dir(c) / f"{model.slug}.steps", model.page_tokens,
            model.max_sequence_length, s.stuck_step_ms / 1000, now, c.tenant_weight, self.workers.send,
            self.kv.send,
        )

    def run(self) -> int:
        bells = [Bell(paths.run_dir(self.config) / f"bell-{model.slug}.sock") for model in self.config.models]
        for bell, host in zip(bells, self.hosts.values(), strict=True):
            host.bell = bell.path
            if bell.fd >= 0:
                self.loop.add_fd(bell.fd, bell.hear)
        try:
            return self.loop.run(self.work)
        finally:
            for host in self.hosts.values():
                host.close()
            for bell in bells:
                bell.close()

    # -------------------------------------------------------------- the round

    def work(self) -> float | None:
        """Move every model on; returns how long nothing has to be done (None: until a frame)."""
        hosts = self.hosts.values()
        for host in hosts:
            host.wake()
        while True:
            now = self._clock()
            for host in hosts:
                host.turn(now)
            for host in hosts:
                self._speak(host)
            asleep = [host.sleep() for host in hosts]
            if all(asleep):
                break
        # A worker in a long step and a kv that moves pages for it are this stage's progress, too.
        kv = self.kv.last_beat
        self.loop.progress = (kv.progress if kv is not None else 0) + sum(
            host.engine.stats.steps + host.engine.stats.submitted + host.signs for host in hosts
        )
        self.loop.busy = self._is_needed() if self.loop.stopping else any(h.engine.is_busy for h in hosts)
        delay = min(host.engine.delay(now) for host in hosts)
        return None if delay == math.inf else delay

    def _speak(self, host: Host) -> None:
        """What the engine has to say to kv and the gateways."""
        engine = host.engine
        if engine.leases.frames:
            for frame in engine.leases.frames:
                self.kv.send(frame)
            engine.leases.frames.clear()
        roster = engine.roster
        if roster.moved:
            for owner, sequences in roster.moved.items():
                self._tell(owner, m.Tokens(host.name, engine.stats.steps, sequences))
            roster.moved.clear()
        if roster.rejected:
            for owner, rejected in roster.rejected:
                self._tell(owner, rejected)
            roster.rejected.clear()

    def _tell(self, gateway: bytes, frame: m.Frame) -> None:
        """Frames to a gateway keep their order; one that does not read has them kept, up to a bound."""
        unsent = self._unsent.get(gateway)
        if not unsent and self.gateways.send(gateway, frame):
            return
        if gateway not in self.gateways.peers:
            return
        if unsent is None:
            unsent = self._unsent[gateway] = deque()
        unsent.append(frame)
        if len(unsent) > MAX_UNSENT:
            log.error("a gateway does not read what it asked for; its sequences are given up")
            self._gateway_lost(gateway)

    def _tick(self) -> None:
        now = self._clock()
        for gateway, unsent in list(self._unsent.items()):
            while unsent and self.gateways.send(gateway, unsent[0]):
                unsent.popleft()
            if not unsent:
                del self._unsent[gateway]
        for host in self.hosts.values():
            host.tick(now)
        hosts = self.hosts.values()
        waiting = [f"{host.name}: {problem}" for host in hosts if (problem := host.problem)]
        is_news = self.loop.reason != "; ".join(waiting)
        self.loop.ready = not waiting
        self.loop.reason = "; ".join(waiting)
        if now >= self._next_push or is_news:
            beats = QUIET_BEATS if self.loop.is_quiet else 1
            self._next_push = now + 0.9 * beats * self.config.server.heartbeat_ms / 1000
            self._push_state("", list(self.gateways.peers))
        if now >= self._next_show:
            self._next_show = now + INTERVAL_S
            for gauge in self._gauges:
                gauge.show(self.loop.metrics)
            show_tenants(self.loop.metrics, [host.engine for host in self.hosts.values()])

    def _is_needed(self) -> bool:
        """Stopping: gateways that stop too drain through us; others submit again to a successor."""
        now = self._clock()
        self._stopping_since = min(self._stopping_since, now)
        if now - self._stopping_since < HEAR_S:
            return bool(self.gateways.peers)
        beats = self.gateways.last_beat
        return any(peer in beats and beats[peer].reason == "stopping" for peer in self.gateways.peers)

    # -------------------------------------------------------------- gateways

    def _on_gateway(self, peer: bytes, frame: m.Frame) -> None:
        if isinstance(frame, m.Submit):
            host = self.hosts.get(frame.model)
            if host is None:
                known = ", ".join(self.hosts)
                refusal = Refusal("MODEL_NOT_FOUND", f"no model {frame.model!r}; there is {known}", "model")
                self._tell(peer, rejection(frame.sequence, refusal))
            else:
                host.engine.door.submit(peer, frame, self._clock())
        elif isinstance(frame, m.Cancel):
            for host in self.hosts.values():
                if frame.sequence in host.engine.roster.live:
                    host.engine.door.cancel(frame)
        elif isinstance(frame, m.SchedulerStats):
            self._push_state(frame.id, [peer])

    def _push_state(self, frame_id: str, peers: list[bytes]) -> None:
        if peers:
            state = m.SchedulerState(frame_id, [host.state() for host in self.hosts.values()])
            for peer in peers:
                self._tell(peer, state)

    def _gateway_up(self, peer: bytes, hello: m.Hello) -> None:
        self._push_state("", [peer])

    def _gateway_down(self, peer: bytes, hello: m.Hello) -> None:
        self._gateway_lost(peer)

    def _gateway_lost(self, peer: bytes) -> None:
        self._unsent.pop(peer, None)
        for host in self.hosts.values():
            host.engine.roster.orphan(peer, self._clock())

    # -------------------------------------------------------------- workers

    def _on_worker(self, peer: bytes, frame: m.Frame) -> None:
        if isinstance(frame, m.StepDone):
            return  # a doorbell: the ring says what is done
        if isinstance(frame, m.WorkerReady):
            host = self.hosts.get(frame.model)
            if host is None:
                log.error("a worker serves a model that is not configured", extra={"model": frame.model})
            else:
                host.worker_ready(peer, self.workers.peers[peer], frame, self._clock())
        elif isinstance(frame, m.WorkerFailed) and frame.model in self.hosts:
            self.hosts[frame.model].worker_failed(frame)

    def _worker_down(self, peer: bytes, hello: m.Hello) -> None:
        for host in self.hosts.values():
            if host.peer == peer:
                host.worker_down(self._clock())

    # -------------------------------------------------------------- kv

    def _kv_up(self) -> None:
        for host in self.hosts.values():
            host.attach_kv()

    def _kv_down(self) -> None:
        for host in self.hosts.values():
            host.kv_down()

    def _on_kv(self, frame: m.Frame) -> None:
        if isinstance(frame, m.Granted | m.Denied):
            for index, host in enumerate(self.hosts.values()):
                # Id 0 answers a declaration: whoever holds that lease knows it.
                if frame.id >> ASK_BITS == index or not frame.id:
                    if isinstance(frame, m.Granted):
                        host.engine.granted(frame)
                    else:
                        host.engine.denied(frame)
        elif isinstance(frame, m.KvReady) and frame.model in self.hosts:
            self.hosts[frame.model].kv_ready(frame, self._clock())
        elif isinstance(frame, m.KvState) and frame.model in self.hosts:
            host = self.hosts[frame.model]
            host.kv_state = frame
            host.engine.kv_state(frame)


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    return SchedulerStage(config).run()
