"""The gateway without sockets: constructs its objects, connects them, and passes on frames and ticks.

    catalog     which loaded version of a model serves                      versions/catalog.py
    loaded      what tokenizer and scheduler report of each version         versions/loaded_versions.py
    readiness   can a model take requests, and if not, why                  admission/server_readiness.py
    in_flight   counts of requests                                          admission/in_flight.py
    body_bytes  bytes of request bodies that are being read                 admission/fair_shares.py
    response_bytes  bytes of responses that wait for their clients          admission/fair_shares.py
    admission   from a validated body to the state of a request             admission/admit.py
    sessions    turns at the KV manager                                     requests/sessions.py
    responses   stored responses and their conversations                    requests/responses.py
    lifecycle   start and end of a request                                  requests/lifecycle.py
    relay       requests in flight: tokens in, text out                     requests/relay.py
    embedder    prompts that are embedded                                   requests/embedder.py
    recovery    journal, replay buffer, keys                                requests/recovery.py
    readers     sinks that read the same request                            requests/readers.py
    plugins     the operator's code around requests; None: there is none    plugins/plugins.py
    timelines   what happened to each request                               tracing/recorder.py
    tracer      spans for OpenTelemetry; None: off                          tracing/tracer.py
    resumer     finds a request and attaches a reader to it                 requests/resume.py
    page_namer  names the pages of a prompt to orchestrators                requests/page_namer.py
    loader      loads, reloads and unloads models                           versions/loader.py
    use         when models were used last                                  versions/model_use.py
    on_demand   requests that wait for models that are not loaded           versions/on_demand.py

Frames leave through the injected functions. The functions that send return False when the peer is down or its queue is
full.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.api.fair_shares import FairShares
from pipeline.api.held_bytes import answer_shares, body_shares
from pipeline.api.keys import Keys
from pipeline.api.quotas import Quotas
from pipeline.config import addresses, paths
from pipeline.config.schema import Config
from pipeline.errors import CODES, StarlingError
from pipeline.models import capacity
from pipeline.models.versions import initial
from pipeline.observe import process_use
from pipeline.observe.metrics import Metrics
from pipeline.protocol import messages as m
from stages.gateway.admission.admit import Admission
from stages.gateway.admission.drain import ALL, drain_timeout
from stages.gateway.admission.in_flight import InFlight
from stages.gateway.admission.server_readiness import ChangeSignal, ServerReadiness
from stages.gateway.metrics import GatewayMetrics
from stages.gateway.requests.embedder import WINDOW, Embedder
from stages.gateway.requests.idempotency import IdempotencyKeys
from stages.gateway.requests.lifecycle import RequestLifecycle
from stages.gateway.requests.page_namer import PageNamer
from stages.gateway.requests.readers import Readers
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.response_cache import ResponseCache
from stages.gateway.requests.responses import Responses
from stages.gateway.requests.resume import Resumer
from stages.gateway.requests.sessions import Sessions
from stages.gateway.requests.state import Filter, SequenceState
from stages.gateway.requests.state_writer import StateWriter
from stages.gateway.requests.stored_responses import StoredResponses
from stages.gateway.tokenizer_client import RETRY_AFTER_S, TokenizerClient
from stages.gateway.tracing.recorder import Recorder
from stages.gateway.tracing.tracer import make_tracer
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.eviction import Eviction
from stages.gateway.versions.load_steps import MeasureMemory
from stages.gateway.versions.loaded_versions import LoadedVersions
from stages.gateway.versions.loader import Loader
from stages.gateway.versions.model_use import ModelUse
from stages.gateway.versions.on_demand import OnDemand
from stages.gateway.versions.passed_tests import PassedTests
from stages.gateway.versions.self_test import SelfTest

if TYPE_CHECKING:
    from stages.gateway.plugins.plugins import Plugins


class Service:
    """One per process. `clock` is monotonic, `wall` is s since 1970 by the system's clock.

    `responses_path`, `self_tests_path`: files of the stored responses and of the passed self-tests; None: in memory.
    `steady` is s since 1970 that no change of that clock moves: for what is compared after a restart; None: `wall`.
    """

    def __init__(
        self,
        config: Config,
        send_scheduler: Callable[[m.Frame], bool],
        send_tokenizer: Callable[[m.Frame], bool],
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(53),
        metrics: Metrics | None = None,
        state_writer: StateWriter | None = None,
        wall: Callable[[], float] = time.time,
        send_kv: Callable[[m.Frame], bool] = lambda frame: False,
        catalog: VersionCatalog | None = None,
        measure: MeasureMemory = capacity.measure,
        steady: Callable[[], float] | None = None,
        api_keys: Keys | None = None,
        responses_path: Path | None = None,
        self_tests_path: Path | None = None,
    ) -> None:
        steady = steady or wall
        self.api_keys = Keys(config) if api_keys is None else api_keys  # one that has no keys yet is false
        self.config = config
        self.clock = clock
        self.metrics = GatewayMetrics(
            metrics or Metrics("gateway", None, clock=clock),
            clock,
            lambda: process_use.memory_bytes(paths.run_dir(config), paths.arena_dir(config)),
            wall,
        )
        self.catalog = catalog or VersionCatalog(config, initial(config), lambda version_table: None)
        self.tokenizer = TokenizerClient(send_tokenizer)
        is_remote = not addresses.edge_address(config, "gateway-scheduler").startswith("ipc://")
        self.wall = wall
        self.tracer = make_tracer(config.tracing.otlp)
        self.timelines = Recorder(config.tracing, clock, wall, is_remote=is_remote, tracer=self.tracer)
        self.plugins = self._make_plugins()
        self.relay = Relay(
            send_scheduler,
            clock,
            on_end=lambda request: self.lifecycle.on_end(request),
            on_other_end=lambda part: self.embedder.on_end(part),
            on_text_complete=lambda request: self.sessions.commit(request) or self.responses.commit(request),
            open_filter=self._open_filter if self.plugins is not None else None,
        )
        self.relay.count_gaps = self.metrics.gaps
        self.embedder = Embedder(send_scheduler, clock, _window(config))
        self.sessions = Sessions(self.relay, send_kv)
        max_requests = config.server.max_concurrent_requests
        stored = StoredResponses(responses_path, config.stored_responses, steady, max_requests)
        self.responses = Responses(self.relay, stored, max_requests)
        self.readers = Readers(self.relay, clock)
        timeout_s = config.server.request_timeout_ms / 1000
        server = config.server
        keys = IdempotencyKeys(
            clock, server.idempotency_ttl_s, server.idempotency_tenant_mb << 20, server.idempotency_mb << 20
        )
        writer = state_writer or StateWriter(None)
        self.recovery = Recovery(self.relay, self.readers, writer, clock, steady, timeout_s, keys, self.timelines)
        self.responses.waiting = self.recovery.waiting
        self.recovery.store_end = self.responses.ended
        self.relay.send_end = self.recovery.send_end
        self.resumer = Resumer(self.recovery, self.readers, self.relay.vocabularies)
        self.changes = changes = ChangeSignal()
        self.page_namer = PageNamer(paths.arena_dir(config), self.catalog)
        self.loaded = LoadedVersions(config, self.catalog, self.relay.vocabularies, self.tokenizer, changes.notify)
        self.readiness = ServerReadiness(config, self.catalog, self.loaded, changes, clock)
        self.has_relayed_tenants = False  # an orchestrator has named the tenant of a request
        self.readiness.has_one_tenant = lambda: (
            not (len(config.tenants) > 1 or self.api_keys.has_file or self.has_relayed_tenants)
        )
        most, share = config.server.max_concurrent_requests, config.concurrent_per_tenant()
        bounds = FairShares(most, share, reserve=most // 8, share_of=self.api_keys.concurrent)
        if self.plugins is not None:
            self.plugins.on_change = changes.notify
            self.readiness.plugin_problem = lambda: self.plugins.problem if self.plugins is not None else ""
        self.in_flight = InFlight(self.relay, self.recovery.waiting_on, bounds)
        self.body_bytes = body_shares(config.server)
        self.response_bytes = answer_shares(config.server)
        self.response_cache = ResponseCache(config.cache.responses, clock)
        quotas = Quotas(config.rate_limits, clock, writer, steady, self.api_keys.limits)
        self.lifecycle = RequestLifecycle(
            self.relay,
            self.sessions,
            self.recovery,
            self.readers,
            self.response_cache,
            self.catalog,
            quotas,
            self.metrics,
            clock,
            self.embedder,
            self.timelines,
        )
        self.use = ModelUse(clock, wall)
        self.loader = Loader(
            config,
            self.catalog,
            self.loaded,
            self.readiness,
            self.in_flight,
            self.lifecycle,
            SelfTest(
                self.loaded,
                self.tokenizer,
                self.relay,
                self.embedder,
                clock,
                PassedTests(self_tests_path),
                config.performance,
            ),
            Eviction(config, self.catalog, self.in_flight, self.use, measure, clock),
            measure,
            steady,
        )
        self.on_demand = OnDemand(config, self.catalog, self.loaded, self.readiness, self.loader, self.use, clock)
        self.on_demand.has_keys = lambda: bool(self.api_keys)
        self.lifecycle.on_used = self.on_demand.used
        self.recovery.load = self.on_demand.start
        self.loader.on_demand_failed = self.on_demand.failed
        self.admission = Admission(
            config,
            self.catalog,
            self.loaded,
            self.readiness,
            self.in_flight,
            quotas,
            self.sessions,
            self.tokenizer,
            clock,
            wall,
            steady,
            draw_seed,
            self.timelines,
            self.on_demand,
        )

    def _make_plugins(self) -> Plugins | None:
        if not self.config.plugins:
            return None
        from stages.gateway.plugins.plugins import Plugins  # memory that servers without plugins save

        return Plugins(self.config, self.clock, self.metrics.numbers)

    def _open_filter(self, sequence: SequenceState) -> Filter:
        assert self.plugins is not None
        return self.plugins.open_filter(sequence, self.relay)

    # ---------------------------------------------------------------- frames

    def on_tokenizer(self, frame: m.Frame) -> None:
        """A frame from the tokenizer."""
        match frame:
            case m.TokenizerFailed():
                error = StarlingError(frame.code, frame.message, frame.param, retry_after_s=_retry_s(frame.code))
                self.tokenizer.on_reply(frame.id, error)
            case m.Encoded() | m.Described() | m.Detokenized():
                self.tokenizer.on_reply(frame.id, frame)

    def on_scheduler(self, frame: m.Frame) -> None:
        """A frame from the scheduler."""
        match frame:
            case m.Tokens():
                if frame.events:
                    self.timelines.on_frame(frame, self.relay.request_of)
                self.relay.on_tokens(frame)
            case m.Rejected():
                if not self.embedder.on_rejected(frame):
                    self.relay.on_rejected(self._named(frame))
            case m.Pooled():
                self.embedder.on_pooled(frame)
            case m.SchedulerState():
                self.loaded.on_scheduler_state(frame)

    def _named(self, frame: m.Rejected) -> m.Rejected:
        """A refusal for too many output tokens, with the name that the request has for their number."""
        request = self.relay.request_of(frame.sequence)
        if request is None or frame.param != "max_tokens":
            return frame
        field = request.spec.generation.max_tokens_field
        return msgspec.structs.replace(frame, param=field, message=frame.message.replace("max_tokens", field))

    # ---------------------------------------------------------------- processes that start and exit

    def on_tokenizer_up(self, hello: m.Hello) -> None:
        """A new tokenizer process: it is sent every open request again."""
        self.readiness.tokenizer.up()
        self.timelines.stage_up("tokenizer", hello)
        self.tokenizer.on_up()
        self.readiness.notify()

    def on_tokenizer_down(self, hello: m.Hello) -> None:
        """The tokenizer has exited."""
        self.readiness.tokenizer.down()
        self.timelines.stage_down("tokenizer", hello)

    def on_scheduler_up(self, hello: m.Hello) -> None:
        """A new scheduler process: it is sent every sequence again."""
        self.readiness.scheduler.up()
        self.timelines.stage_up("scheduler", hello)
        self.loaded.states.clear()
        self.relay.on_scheduler_up()
        self.embedder.on_scheduler_up()
        self.readiness.notify()

    def on_scheduler_down(self, hello: m.Hello) -> None:
        """The scheduler has exited."""
        self.readiness.scheduler.down()
        self.timelines.stage_down("scheduler", hello)
        self.loaded.states.clear()

    def on_kv_up(self, hello: m.Hello) -> None:
        """A new KV manager process."""
        self.readiness.kv.up()
        self.timelines.stage_up("kv", hello)
        self.sessions.on_up(hello)

    def on_kv_down(self, hello: m.Hello) -> None:
        """The KV manager has exited."""
        self.readiness.kv.down()
        self.timelines.stage_down("kv", hello)
        self.sessions.on_down(hello)

    # ---------------------------------------------------------------- time

    def tick(
        self,
        tokenizer: m.Heartbeat | None,
        scheduler: m.Heartbeat | None,
        kv: m.Heartbeat | None = None,
    ) -> None:
        """At each tick, with the last heartbeat of each stage."""
        self.readiness.observe(tokenizer, scheduler, kv)
        self.tokenizer.tick()
        self.relay.tick()
        self.embedder.tick()
        self.sessions.tick()
        for drain in self.readiness.drains.due():
            model = "" if drain.target == ALL else drain.target
            drain.ended += self.lifecycle.end_all(drain_timeout(drain), model=model, is_exit=drain.is_exit)
        if not self.readiness.is_stopping:
            self.recovery.tick(self.loaded.described, self.catalog)
            self.readers.tick()
        self.response_cache.expire()
        self.sample()
        self.readiness.describe_missing()

    @property
    def is_steady(self) -> bool:
        """Whether nothing waits for a tick but deadlines and expiry."""
        return not (
            self.relay.unsubmitted
            or self.tokenizer.has_unsent
            or self.embedder.is_busy
            or self.sessions.has_unsent
            or self.recovery.has_waiting
            or self.readiness.drains.targets
            or any(version.state != "serving" for version in self.catalog.all)
        )

    def sample(self) -> None:
        """Update the metrics that are read from state."""
        journal = self.recovery.journal
        self.metrics.sample(self.in_flight.count, self.relay.counts, journal.left_out, journal.unreadable)
        self.metrics.sample_keys(self.recovery.keys)
        if self.tracer is not None:
            self.metrics.sample_traces(self.tracer.exporter)
        errors = {"keys": self.api_keys.errors, "responses": self.responses.store.errors, **journal.errors}
        for files, count in errors.items():
            self.metrics.numbers.set("starling_state_file_errors_total", count, files)
        if self.response_cache.is_enabled:
            self.metrics.sample_responses(self.response_cache, [model.name for model in self.config.models])


def _window(config: Config) -> int:
    """Prompts of one request that may wait at the scheduler: what its queues hold."""
    return min(WINDOW, config.scheduler.max_queue_depth, config.rate_limits.max_queue_depth or WINDOW)


def _retry_s(code: str) -> float:
    """When to send a text again that the tokenizer has refused, in s; 0: it would be refused again."""
    known = CODES.get(code)
    return RETRY_AFTER_S if known is not None and known.retry else 0.0
