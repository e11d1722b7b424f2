"""Requests for models that are not loaded: they start the load and wait for it.

The first request starts the load, and later ones wait for the same.  A request is admitted to the version as soon as
its vocabulary is known, so that it is in the journal while the workers still start; the scheduler queues it.  How many
requests wait is bounded, in all and for each principal (pipeline/api/fair_shares.py), and so is the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.api.fair_shares import FairShares, Refusal
from pipeline.api.keys import Caller
from pipeline.config.schema import Config
from pipeline.errors import ModelUnavailable, Overloaded, StarlingError
from pipeline.models.versions import ModelVersion
from stages.gateway.admission.server_readiness import ServerReadiness
from stages.gateway.versions import load_errors
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.loaded_versions import LoadedVersions
from stages.gateway.versions.loader import Change, Loader
from stages.gateway.versions.model_use import ModelUse

RETRY_AFTER_S = 5.0  # of a 429 or 503
SHOWN_STATES = {"serving": "loaded", "loading": "loading", "retiring": "unloading"}  # to clients
POLL_S = 0.5  # between two checks without an event


class OnDemand:
    """One per gateway. `clock` is monotonic, in s."""

    def __init__(
        self,
        config: Config,
        catalog: VersionCatalog,
        loaded: LoadedVersions,
        readiness: ServerReadiness,
        loader: Loader,
        use: ModelUse,
        clock: Callable[[], float],
    ) -> None:
        most = config.on_demand.max_waiting
        share = config.on_demand.max_waiting_per_tenant or max(1, most - most // 4)
        self.waiting = FairShares(most, min(most, share), reserve=0)
        self.use = use
        self.has_keys: Callable[[], bool] = lambda: False  # whether there may be several tenants
        self._is_enabled = config.on_demand.enabled
        self._wait_s = config.on_demand.wait_ms / 1000
        self._catalog = catalog
        self._loaded = loaded
        self._readiness = readiness
        self._loader = loader
        self._clock = clock
        self._failed: dict[str, tuple[float, StarlingError]] = {}  # by model: until when its error is repeated

    def must_wait(self, model: str, needs_serving: bool = False) -> bool:
        """Whether a request for the model has to wait for a load. Raises `ModelNotFound`."""
        return self.usable(self._catalog.resolve(model), needs_serving) is None

    def progress(self, model: str) -> str:
        """What a request for the model waits for, for people."""
        phase = self._loader.phase(model)
        return f"loading {model}: {phase.removeprefix('loading: ')}" if phase else f"waiting for {model}"

    def fields(self, model: str) -> dict[str, Any]:
        """Whether a model is loaded, when it was used last (s since 1970), and how long it stays (s, None: no end)."""
        versions = self._catalog.versions(model)
        states = {version.state for version in versions}
        state = next((shown for known, shown in SHOWN_STATES.items() if known in states), "unloaded")
        left_s = self.use.end(model) - self._clock()
        return {
            "state": state,
            "pinned": any(version.settings.pinned for version in versions),
            "last_used": self.use.last_used(model),
            "expires_in_s": round(max(0.0, left_s), 1) if math.isfinite(left_s) else None,
        }

    def used(self, model: str, tenant: str, keep_alive: float | None) -> None:
        """A request of the tenant for the model has begun or ended. `keep_alive`: its own, in s; negative: for good.

        The version is the one that serves, or one that takes requests while it is loaded: a short answer may end
        before its version serves.  Without any only the time is noted.
        """
        version = self.usable(model)
        if version is None:
            self.use.asked(model)
            return
        configured = self._catalog.loadable.keep_alive_s(version.settings)
        seconds = configured if keep_alive is None else keep_alive
        seconds = math.inf if seconds < 0 else seconds
        if (version.settings.preload and self.has_keys()) or not self._is_enabled:
            seconds = max(seconds, configured)  # it is there for all tenants, or could not be loaded again
        self.use.used(model, version.id, tenant, seconds)

    @contextmanager
    def using(self, model: str, caller: Caller, keep_alive: float | None) -> Iterator[None]:
        """Count the end of a request for the model, too."""
        try:
            yield
        finally:
            self.used(model, caller.tenant, keep_alive)

    def start(self, model: str) -> None:
        """Load the model if that is needed and allowed, without waiting for it."""
        if self.usable(model) is None and self._catalog.may_load(model) and self._error_of(model) is None:
            try:
                self._loader.demand(model)
            except StarlingError as error:
                self.failed(model, error)

    async def version(
        self, model: str, principal: str, left_s: float, is_streamed: bool = False, needs_serving: bool = False
    ) -> ModelVersion:
        """The version to admit a request to; loads the model if necessary. `left_s`: of the request's time.

        With `needs_serving` it waits until the version serves: the tokens of a session are at the KV manager, and the
        digests of adapters are known then.

        `principal`: whose share of the places it takes.  Raises `Overloaded` if too many requests wait,
        `ModelUnavailable` if the time is over, or the error of the load.
        """
        found = self.usable(model, needs_serving)
        if found is not None:
            return found
        if (error := self._error_of(model)) is not None:
            raise error
        self._check_queue(model, principal)
        wait_s = left_s if is_streamed else min(left_s, self._wait_s)
        deadline = self._clock() + wait_s
        with self.waiting.taken(principal):
            change: Change | None = None
            while (found := self.usable(model, needs_serving)) is None:
                if refusal := self._readiness.refusal(model) or self._readiness.unloading(model):
                    raise refusal
                if change is not None and change.is_over:
                    if change.error is not None:
                        raise self.failed(model, change.error)
                    change = None
                left = deadline - self._clock()
                if left <= 0:
                    raise ModelUnavailable(
                        f"model {model!r} was not loaded within {wait_s:g} s ({self._loader.phase(model)}); try again",
                        "model",
                        retry_after_s=RETRY_AFTER_S,
                    )
                if change is None:
                    change = self._demand(model)
                await self._readiness.wait_for_change(min(left, POLL_S))
        return found

    def _demand(self, model: str) -> Change:
        if not self._catalog.loading(model) and not self._catalog.may_load(model):
            raise ModelUnavailable(f"model {model!r} is not loaded", "model", retry_after_s=RETRY_AFTER_S)
        try:
            return self._loader.demand(model)
        except StarlingError as error:
            raise self.failed(model, error) from None

    def usable(self, model: str, needs_serving: bool = False) -> ModelVersion | None:
        """The version that serves the model, or one that is being loaded on demand and takes requests already."""
        serving = self._catalog.serving(model)
        if serving is not None or needs_serving:
            return serving
        for version in self._catalog.loading(model):
            if version.takes_requests and version.id in self._loaded.described:
                return version
        return None

    def _check_queue(self, model: str, principal: str) -> None:
        waiting = self.waiting
        refusal = waiting.refusal(principal)
        if refusal is None:
            return
        bound = f"{waiting.held} requests wait for loads, and at most {waiting.total} may (on_demand.max_waiting)"
        if refusal is Refusal.SHARE:
            bound = (
                f"{waiting.held_by(principal)} of your requests wait for loads, and at most {waiting.share} may "
                f"(on_demand.max_waiting_per_tenant)"
            )
        raise Overloaded(f"model {model!r} is not loaded; {bound}; try again", "model", retry_after_s=RETRY_AFTER_S)

    # ---------------------------------------------------------------- loads that failed

    def _error_of(self, model: str) -> StarlingError | None:
        """A new error like that of a load that failed a moment ago."""
        until, error = self._failed.get(model, (0.0, None))
        if error is not None and self._clock() >= until:
            del self._failed[model]
            return None
        return error and load_errors.for_requests(model, error)  # a raised error refers to the frames it went through

    def failed(self, model: str, error: StarlingError) -> StarlingError:
        """A load has failed. Return the error that requests get for it, for some seconds without another attempt."""
        if (known := self._error_of(model)) is not None:
            return known
        if self._catalog.serving(model) is None:
            self.use.unloaded(model)
        error = load_errors.for_requests(model, error)
        self._failed[model] = (self._clock() + load_errors.RETRY_AFTER_S, error)
        return load_errors.for_requests(model, error)
