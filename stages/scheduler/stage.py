"""The scheduler process: its sockets, and the loop that moves every model's engine.

One round: take in what the peers have sent, then for each model complete and publish (the worker waits
for nothing else), then tell kv and the gateways.  Before it blocks it asks every busy worker for a
doorbell and looks once more at what has been acknowledged, so that no wake-up is lost.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque

from pipeline.config import paths
from pipeline.config.load import Config
from pipeline.ipc.doorbell import Doorbell
from pipeline.ipc.liveness import IDLE_INTERVALS
from pipeline.ipc.poll_loop import PollLoop
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.scheduler.core.engine import Settings
from stages.scheduler.core.model_version import Host
from stages.scheduler.core.sequence_table import rejection
from stages.scheduler.draft.pairing import Pairs
from stages.scheduler.draft.proposer import FEW
from stages.scheduler.metrics import INTERVAL_S, Gauge, show_tenants
from stages.scheduler.policy.admission import Refusal
from stages.scheduler.policy.core_sharing import Turns, steps_ahead

log = logging.getLogger("starling.scheduler")

MAX_UNSENT = 65_536  # frames kept for a gateway that does not read; beyond, it is given up


class SchedulerStage:
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
        self._unsent: dict[bytes, deque[m.Frame]] = {}
        self._next_push = 0.0
        self.hosts: dict[str, Host] = {}  # by instance
        self._told: list[tuple[str, str, str]] = []  # of each host, what gateways know
        self._serving: set[str] = set()  # instances without which this stage is not ready
        self._bells: dict[str, Doorbell] = {}
        self._turns = Turns()
        self._pairs = Pairs()
        self._gauges: dict[str, Gauge] = {}  # by model
        self._past_tenants: Counter[str] = Counter()  # tokens computed by hosts that are gone
        self._next_show = 0.0
        self.follower = versions.VersionFollower(config)
        self._remove_strangers()
        self._follow()

    # -------------------------------------------------------------- which models there are

    def _follow(self) -> None:
        """Hosts for what the record names, and for nothing else."""
        self.loop.mark_active()
        wanted = {one.id: one for one in self.follower.table.versions}
        for name in [name for name in self.hosts if name not in wanted]:
            self._remove(name)
        for instance in wanted.values():
            if instance.id not in self.hosts:
                self._add(instance)
        self._serving = {one.id for one in wanted.values() if one.state == "serving"}
        self._pairs.look(self.follower.table, self.hosts)

    def _add(self, instance: ModelVersion) -> None:
        host = self._host(instance, self._clock())
        bell = Doorbell(paths.run_dir(self.config) / f"bell-{instance.slug}.sock")
        host.bell = bell.path
        if bell.fd >= 0:
            self.loop.add_fd(bell.fd, bell.drain)
        self.hosts[instance.id] = host
        self._bells[instance.id] = bell
        gauge = self._gauges.setdefault(instance.name, Gauge(instance.name))
        gauge.engines[instance.id] = host.engine

    def _remove(self, name: str) -> None:
        """The gateway is through with it; its worker group is ended by whoever started it."""
        host = self.hosts.pop(name)
        host.retire()
        self._speak(host)
        for gauge in self._gauges.values():
            gauge.remove(name)
        for tenant in host.engine.queues.tenants.values():
            self._past_tenants[tenant.name] += tenant.computed
        bell = self._bells.pop(name)
        if bell.fd >= 0:
            self.loop.remove_fd(bell.fd)
        bell.close()
        host.close()
        log.info("model is gone", extra={"instance": name})

    def _remove_strangers(self) -> None:
        """What an earlier life has left of instances that are gone since."""
        wanted = {one.slug for one in self.follower.table.versions}
        for path in paths.arena_dir(self.config).glob("*.steps"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)
        for path in paths.run_dir(self.config).glob("bell-*.sock"):
            if path.stem.removeprefix("bell-") not in wanted:
                path.unlink(missing_ok=True)
        for path in paths.arena_dir(self.config).glob(".*.steps.*"):
            path.unlink(missing_ok=True)  # half made, by a predecessor: this stage's lock is ours

    def _host(self, instance: ModelVersion, now: float) -> Host:
        c, s = self.config, self.config.scheduler
        model = instance.model
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
            companions=FEW if any(one.draft_model == instance.name for one in c.models) else 0,
            prefix_cache=c.cache.enabled,
        )
        host = Host(
            settings,
            paths.arena_dir(c) / f"{model.slug}.steps",
            model.page_tokens,
            model.max_sequence_length,
            s.stuck_step_ms / 1000,
            now,
            c.tenant_weight,
            self.workers.send,
            self.kv.send,
        )
        host.cores = frozenset(model.cpus)
        return host

    def run(self) -> int:
        try:
            return self.loop.run(self.work)
        finally:
            for host in self.hosts.values():
                host.close()
            for bell in self._bells.values():
                bell.close()

    # -------------------------------------------------------------- the round

    def work(self) -> float | None:
        """Move every model on; returns how long nothing has to be done (None: until a frame)."""
        hosts = self.hosts.values()
        for host in hosts:
            host.wake()
        while True:
            now = self._clock()
            self._take_turns(now)
            asked = [host for host in hosts if host.engine.companions.take_asked()]
            if asked:  # whoever asked may have had its turn after the one it asked
                self._take_turns(now)
            for host in hosts:
                self._speak(host)
            asleep = [host.sleep() for host in hosts]
            if all(asleep):
                break
        # A worker in a long step and a kv that moves pages for it are this stage's progress, too.
        kv = self.kv.last_heartbeat
        self.loop.progress = (kv.progress if kv is not None else 0) + sum(
            host.engine.stats.steps + host.engine.stats.submitted + host.signs for host in hosts
        )
        is_busy = any(host.engine.is_busy for host in hosts)
        self.loop.busy = self.loop.serves_stopping_clients(self.gateways) if self.loop.stopping else is_busy
        delay = min((host.engine.delay(now) for host in hosts), default=math.inf)
        return None if delay == math.inf else delay

    def _take_turns(self, now: float) -> None:
        """Every model completes; one publishes after the other, as far as they leave each other the cores."""
        claims = {}
        if len(self.hosts) > 1:
            for name, host in self.hosts.items():
                host.engine.complete(now)
                if host.claims(now):
                    claims[name] = host.claim()
            self._pairs.mind(claims.values(), self.hosts)
        if len(claims) < 2:
            for host in self.hosts.values():
                host.engine.allowed = host.engine.depth
                host.turn(now)
            return
        for name in [*self._turns.order(list(claims.values())), *(n for n in self.hosts if n not in claims)]:
            host = self.hosts[name]
            if name in claims:
                host.engine.allowed = steps_ahead(claims[name], list(claims.values()), host.engine.depth)
            host.turn(now)
            if name in claims:
                claims[name] = host.claim()

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
        if self.follower.poll():
            self._follow()
        for gateway, unsent in list(self._unsent.items()):
            while unsent and self.gateways.send(gateway, unsent[0]):
                unsent.popleft()
            if not unsent:
                del self._unsent[gateway]
        for host in self.hosts.values():
            host.tick(now)
        problems = {name: host.problem for name, host in self.hosts.items()}
        waiting = [f"{name}: {problem}" for name, problem in problems.items() if problem and name in self._serving]
        known = [(name, host.digest, problems[name]) for name, host in self.hosts.items()]
        is_news, self._told = known != self._told, known
        # Requests for the others are taken: whoever asks for one that is not ready hears it from its state.
        self.loop.ready = len(waiting) < max(1, len(self._serving))
        self.loop.reason = "; ".join(waiting)
        if now >= self._next_push or is_news:
            beats = IDLE_INTERVALS if self.loop.is_idle else 1
            self._next_push = now + 0.9 * beats * self.config.server.heartbeat_ms / 1000
            self._push_state(list(self.gateways.peers))
        if now >= self._next_show:
            self._next_show = now + INTERVAL_S
            for gauge in self._gauges.values():
                gauge.show(self.loop.metrics)
            engines = [host.engine for host in self.hosts.values()]
            show_tenants(self.loop.metrics, engines, self._past_tenants)

    # -------------------------------------------------------------- gateways

    def _on_gateway(self, peer: bytes, frame: m.Frame) -> None:
        if isinstance(frame, m.Submit):
            host = self.hosts.get(frame.model)
            if host is None and self.follower.poll():  # newer than our last look at the record
                self._follow()
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

    def _push_state(self, peers: list[bytes]) -> None:
        if peers:
            state = m.SchedulerState([host.state() for host in self.hosts.values()])
            for peer in peers:
                self._tell(peer, state)

    def _gateway_up(self, peer: bytes, hello: m.Hello) -> None:
        self._push_state([peer])

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
            if host is None and self.follower.poll():
                self._follow()
                host = self.hosts.get(frame.model)
            if host is None:
                log.info("a worker serves a model that is not loaded (any more)", extra={"model": frame.model})
            else:
                host.worker_ready(peer, self.workers.peers[peer], frame, self._clock())
                self._pairs.look(self.follower.table, self.hosts)

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
        if isinstance(frame, m.Granted):
            if frame.model in self.hosts:
                self.hosts[frame.model].engine.granted(frame)
        elif isinstance(frame, m.Denied):
            if frame.model in self.hosts:
                self.hosts[frame.model].engine.denied(frame)
        elif isinstance(frame, m.KvReady) and frame.model in self.hosts:
            self.hosts[frame.model].kv_ready(frame, self._clock())
        elif isinstance(frame, m.KvState) and frame.model in self.hosts:
            host = self.hosts[frame.model]
            host.kv_state = frame
            host.engine.kv_state(frame)


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    return SchedulerStage(config).run()
