"""Can the server take a request for a model now? If not, why, and waiting until it can.

Combines the health of the three stages that the gateway talks to, the state of each model's serving version, drains,
and whether this process is stopping. Every wait is bounded. The clock is injected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pipeline.api.overload import Overload
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ModelUnavailable, StarlingError
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.admission.drain import Drains
from stages.gateway.admission.stage_health import StageHealth, model_report
from stages.gateway.tokenizer_client import RETRY_AFTER_S
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.loaded_versions import LoadedVersions

READY_WAIT_S = 10.0  # how long a request waits for a stage that is restarting before it gets 503


class ChangeSignal:
    """Wakes the coroutines that wait for a change of readiness."""

    def __init__(self) -> None:
        self.on_notify: Callable[[], object] = lambda: None
        self._changed: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Readiness may have changed."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None
        self.on_notify()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next `notify`, or after `timeout_s`."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._changed}, timeout=timeout_s)


class ServerReadiness:
    """One per gateway. `clock` is monotonic, in s."""

    def __init__(
        self,
        config: Config,
        catalog: VersionCatalog,
        loaded: LoadedVersions,
        changes: ChangeSignal,
        clock: Callable[[], float],
    ) -> None:
        heartbeat_s = config.server.heartbeat_ms / 1000
        self.tokenizer = StageHealth("tokenizer", clock, heartbeat_s)
        self.scheduler = StageHealth("scheduler", clock, heartbeat_s)
        self.kv = StageHealth("kv", clock, heartbeat_s)
        self.drains = Drains(clock)  # requested by an operator
        self.plugin_problem: Callable[[], str] = lambda: ""  # why plugins refuse requests; "": they do not
        self.has_one_tenant: Callable[[], bool] = lambda: True  # no request can be of another one
        self.is_stopping = False  # this process received SIGTERM: it takes no more requests for text
        self.is_handing_over = False  # connections are closed after their response, for the successor
        self._max_in_flight = config.server.max_concurrent_requests
        self._max_waiting = config.scheduler.max_queue_depth
        self._overload = Overload()
        self._queues: dict[str, Overload] = {}  # by version
        self._run_dir = paths.run_dir(config)
        self._catalog = catalog
        self._loaded = loaded
        self._changes = changes
        self._clock = clock

    def stop(self) -> None:
        """Take no more requests for text."""
        self.is_stopping = True
        self.notify()

    def notify(self) -> None:
        """Readiness may have changed: wake the requests that wait for it."""
        self._changes.notify()

    def describe_missing(self) -> None:
        """Ask the tokenizer, if it is ready, for the description of every version that has none."""
        if not self.tokenizer.problem:
            self._loaded.describe_missing()

    def observe(self, tokenizer: m.Heartbeat | None, scheduler: m.Heartbeat | None, kv: m.Heartbeat | None) -> None:
        """At every tick: the last heartbeat of each stage, which may have stopped."""
        for health, heartbeat in ((self.tokenizer, tokenizer), (self.scheduler, scheduler), (self.kv, kv)):
            self.on_heartbeat(health, heartbeat)

    def on_heartbeat(self, health: StageHealth, heartbeat: m.Heartbeat | None) -> None:
        """A heartbeat has arrived, or the last one is looked at again.

        Heartbeats count from their arrival, not from the next tick: an idle gateway ticks as rarely as an idle stage
        sends, so a heartbeat that arrives just after a tick would count as half a second late.
        """
        had_problem = bool(health.problem)
        health.observe(heartbeat)
        if had_problem != bool(health.problem):
            self.notify()
            if health is self.tokenizer:
                self.describe_missing()

    # ---------------------------------------------------------------- now

    def problem(self, model: str) -> str:
        """Why the model cannot take a request now; "" if it can."""
        if reason := self.drains.reason(model):
            return reason
        if problem := self._stage_problem():
            return problem
        serving = self._catalog.serving(model)
        if serving is None and not self._catalog.versions(model):
            return f"model {model} is not loaded"
        if serving is None:
            return f"model {model} is being {'unloaded' if self._catalog.is_retiring(model) else 'loaded'}"
        if serving.id not in self._loaded.described:
            return "tokenizer: the model is not described yet"
        report = self._model(serving)
        return "" if report["ready"] else f"model {model}: {report['reason']}"

    def _stage_problem(self) -> str:
        """Which stage cannot serve any model, and why; "" if all can."""
        # When the KV manager is down the scheduler reports its models as not ready.
        for health in (self.tokenizer, self.scheduler, *([self.kv] if self.kv.is_up else [])):
            if problem := health.problem:
                return f"{health.stage}: {problem}"
        return self.plugin_problem()

    def unready_stages(self) -> set[str]:
        """The stages that send no heartbeats or say that they are not ready, and workers that the scheduler lacks."""
        found = {one.stage for one in (self.tokenizer, self.scheduler, self.kv) if one.problem}
        if not found & {"scheduler", "kv"}:  # without which no model is ready
            serving = filter(None, map(self._catalog.serving, self._catalog.names))
            found |= {version.stage for version in serving if not self._model(version)["ready"]}
        return found

    def _model(self, serving: ModelVersion) -> dict[str, Any]:
        """The fields of a model in /ready. A worker group that cannot start has recorded the reason."""
        state = self._loaded.states.get(serving.id)
        report = model_report(state)
        if not report["ready"] and (failure := versions.read_failure(self._run_dir, serving.stage)) is not None:
            report["reason"] = f"its worker cannot start: {failure.message}"
        return report

    def _is_overloaded(self, serving: ModelVersion) -> bool:
        """Whether the queue of the model is full, for /ready."""
        state, queue = self._loaded.states.get(serving.id), self._queues.setdefault(serving.id, Overload())
        return queue.observe(state.waiting if state is not None else 0, self._max_waiting)

    def _is_full(self, overloaded: dict[str, bool]) -> bool:
        """Whether no model takes a request. In a full queue a tenant with fewer sequences than others gets a place."""
        if not overloaded or not all(overloaded.values()) or not self.has_one_tenant():
            return False
        return set(self._catalog.known_names()) <= set(overloaded)  # else requests load further ones

    def _worker_groups(self, serving: ModelVersion) -> list[dict[str, Any]]:
        """The fields of each worker group in /ready, if the model has several."""
        state = self._loaded.states.get(serving.id)
        found = []
        for number, reason in enumerate(state.groups if state is not None else ()):
            stage = serving.of_group(number).stage
            failure = versions.read_failure(self._run_dir, stage) if reason else None
            if failure is not None:
                reason = f"its worker cannot start: {failure.message}"
            found.append({"stage": stage, "ready": not reason, "reason": reason or None})
        return found

    def refusal(self, model: str = "") -> StarlingError | None:
        """Why no request for the model ("": for any model) is admitted, however long it waits; None if it is."""
        if self.is_stopping:
            message = "the server is being stopped and takes no more requests; try again"
            return StarlingError("DRAINING", message, retry_after_s=RETRY_AFTER_S)
        return self.drains.rejection(model)

    def unloading(self, model: str) -> StarlingError | None:
        """The refusal of a model that is being unloaded. Raises `ModelNotFound` if it is gone."""
        if not self._catalog.is_unloading(self._catalog.resolve(model)):
            return None
        message = f"model {model} is being unloaded and takes no more requests"
        return StarlingError("DRAINING", message, "model", retry_after_s=RETRY_AFTER_S)

    def report(self, in_flight: int) -> dict[str, Any]:
        """The body of /ready: the state of each stage and model, and the conclusion."""
        models: dict[str, dict[str, Any]] = {}
        overloaded: dict[str, bool] = {}  # models that are served
        for name in self._catalog.names:
            serving = self._catalog.serving(name)
            models[name] = self._model(serving) if serving is not None else model_report(None)
            if serving is None:
                models[name]["reason"] = "it is being loaded"
            elif groups := self._worker_groups(serving):
                models[name]["worker_groups"] = groups
            if serving is not None:
                overloaded[name] = models[name]["overloaded"] = self._is_overloaded(serving)
            if drained := self.drains.reason(name):
                models[name] |= {"ready": False, "reason": drained}
        self._queues = {key: queue for key, queue in self._queues.items() if key in self._loaded.states}
        # A model that is being loaded for the first time does not make the others unready.
        problems = [self.problem(name) for name in models if self._catalog.serving(name) is not None]
        if not problems and self._catalog.known_names():
            problems = [self._stage_problem()]  # requests load what they need
        if not problems:
            problems = [f"model {name} is being loaded" for name in models] or ["no model is loaded"]
        is_overloaded = self._overload.observe(in_flight, self._max_in_flight)
        closed = "draining" if self.is_stopping else self.drains.reason()
        reason = closed or next(filter(None, problems), "")
        if not reason and is_overloaded:
            reason = f"{in_flight} requests are in flight, of at most {self._max_in_flight}"
        if not reason and self._is_full(overloaded):
            reason = f"the queue of every model is full (scheduler.max_queue_depth = {self._max_waiting})"
        return {
            "ready": not reason,
            "reason": reason or None,
            "stages": {
                "gateway": {
                    "ready": not closed and not is_overloaded,
                    "reason": closed or ("overloaded" if is_overloaded else None),
                    "in_flight": in_flight,
                },
                "tokenizer": self.tokenizer.report(),
                "scheduler": self.scheduler.report(),
                "kv": self.kv.report(),
            },
            "models": models,
        }

    # ---------------------------------------------------------------- waiting

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when readiness may have changed, or after `timeout_s`."""
        await self._changes.wait(timeout_s)

    async def wait_ready(self, model: str, wait_s: float = READY_WAIT_S) -> None:
        """Wait until the model can take a request. Raises `ModelUnavailable` with the reason, or a refusal."""
        await self._wait(lambda: self.problem(model), wait_s, model)

    async def describe(self, version: ModelVersion) -> m.Described:
        """The version's description. Raises `ModelUnavailable` if the tokenizer does not start in time."""
        described = self._loaded.described
        await self._wait(
            lambda: "" if version.id in described else self.tokenizer.problem or "the model is not described",
            READY_WAIT_S,
            version.name,
        )
        return described[version.id]

    async def _wait(self, problem: Callable[[], str], wait_s: float, model: str) -> None:
        deadline = self._clock() + wait_s
        while reason := problem():
            if refusal := self.refusal(model) or self.unloading(model):
                raise refusal
            left = deadline - self._clock()
            if left <= 0:
                raise ModelUnavailable(
                    f"the server is not ready ({reason}); try again in {RETRY_AFTER_S:.0f} s",
                    retry_after_s=RETRY_AFTER_S,
                )
            await self._changes.wait(min(left, 0.5))
