"""Loading, reloading and unloading models while the server runs: `starling load`, `reload`, `unload`.

    load, reload   a version is loaded (`load_steps.py`); one that it replaces retires
    unload         the version retires: its requests finish, or are ended after the timeout; then it is dropped
    demand         a load that requests wait for (`on_demand.py`), after idle models have made room for it

For an adapter (MODEL:ADAPTER) each of them loads a version of the model with other adapters, which replaces the serving
one; nothing else of the model is read again.

One version is loaded at a time; other loads wait.  A version that cannot be loaded or fails its self-test is dropped,
and the serving version keeps serving.  A version that is replaced stays until its last request has ended.  Every change
is in the version table, so a gateway that is restarted continues it.  A change has an id, chosen by the caller: a
repeated command with the same id only reports the progress.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    ResourceError,
    StarlingError,
)
from pipeline.models import capacity, worker_groups
from pipeline.models.versions import ModelVersion, Op, Outcome
from stages.gateway.admission.in_flight import InFlight
from stages.gateway.admission.server_readiness import ServerReadiness
from stages.gateway.requests.lifecycle import RequestLifecycle
from stages.gateway.versions import load_errors
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.eviction import Eviction
from stages.gateway.versions.load_settings import (
    adapter_settings,
    check_slug,
    demand_settings,
    known_digest,
    load_settings,
)
from stages.gateway.versions.load_steps import LoadSteps, MeasureMemory
from stages.gateway.versions.loaded_versions import LoadedVersions
from stages.gateway.versions.self_test import SelfTest

log = logging.getLogger("starling.gateway.loader")

MAX_CHANGES = 64  # in progress or waiting
UNLOAD_RETRY_AFTER_S = 5.0  # for requests that an unload ends
DEMAND_TIMEOUT_S = 600.0  # of a load that requests wait for


class Change:
    """A load or reload in progress in this process."""

    def __init__(self, change_id: str, op: Op, name: str) -> None:
        self.id, self.op, self.name = change_id, op, name
        self.phase = "waiting for another load"
        self.task: asyncio.Task[None] | None = None
        self.error: StarlingError | None = None  # why it failed

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.task is not None and self.task.done()


class AdapterChange(NamedTuple):
    """That a load is of a version with other adapters. `renew` makes its settings from those of the serving one."""

    name: str  # the adapter that is added, read again or removed
    renew: Callable[[], ModelConfig]


class Loader:
    """The changes of one gateway. `wall` is s since 1970."""

    def __init__(
        self,
        config: Config,
        catalog: VersionCatalog,
        loaded: LoadedVersions,
        readiness: ServerReadiness,
        in_flight: InFlight,
        lifecycle: RequestLifecycle,
        self_test: SelfTest,
        eviction: Eviction,
        measure: MeasureMemory = capacity.measure,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._loaded = loaded
        self._readiness = readiness
        self._in_flight = in_flight
        self._lifecycle = lifecycle
        self._eviction = eviction
        self._wall = wall
        self._steps = LoadSteps(
            config, catalog, loaded, readiness, self_test, measure, wall, self._set_phase, self._end_requests
        )
        self._changes: dict[str, Change] = {}
        self._failed: dict[str, StarlingError] = {}  # by change id: changes that failed before they were in the table
        self._ended: dict[str, int] = {}  # by id of a retiring version: requests that did not finish in time
        self._load_lock = asyncio.Lock()  # one load at a time
        # Called when a new version is in the table, or one retires: ticks drop it, and a load may wait for its memory.
        self.on_begun: Callable[[], object] = lambda: None
        eviction.on_retired = lambda: self.on_begun()
        self.on_demand_failed: Callable[[str, StarlingError], object] = lambda name, error: None
        self.on_unloaded: Callable[[str], object] = lambda name: None  # called when an operator has unloaded a model

    # ---------------------------------------------------------------- commands

    def load(self, name: str, path: str, change: str, timeout_s: float, kv_cache_mb: int = 0) -> None:
        """Start loading a model, unless the change is known. Raises `StarlingError`."""
        if self.is_known(change):
            return
        if ":" in name:
            if kv_cache_mb:
                raise InvalidRequest("kv_cache_mb belongs to a model, and the target is an adapter", "kv_cache_mb")
            self._change_adapter("load", name, path, change, timeout_s)
            return
        if self._catalog.versions(name) and not self._catalog.is_retiring(name):
            raise Conflict(f"model {name!r} is already loaded; `starling reload {name}` replaces it", "target")
        self._start_load("load", load_settings(self._catalog, name, path, kv_cache_mb), change, timeout_s)

    def reload(self, name: str, path: str, change: str, timeout_s: float) -> None:
        """Start loading a version that replaces the serving one, unless the change is known. Raises `StarlingError`."""
        if self.is_known(change):
            return
        if ":" in name:
            self._change_adapter("reload", name, path, change, timeout_s)
            return
        if self._catalog.serving(name) is None:
            if self._catalog.loading(name):
                raise Conflict(f"model {name!r} is being loaded for the first time; wait for that", "target")
            raise _not_loaded(name, self._catalog.names)
        self._start_load("reload", load_settings(self._catalog, name, path), change, timeout_s)

    def demand(self, name: str) -> Change:
        """The load of a model that requests wait for: the one in progress, or a new one. Raises `StarlingError`."""
        for change in self._changes.values():
            if change.name == name and change.op != "unload":
                return change
        for version in self._catalog.loading(name):  # begun by an earlier gateway
            return self._continue(version)
        return self._start_load("demand", demand_settings(self._catalog, name), new_change_id(), DEMAND_TIMEOUT_S)

    def unload(self, name: str, change: str, timeout_s: float) -> None:
        """Start unloading a model, unless the change is known. Raises `StarlingError`.

        No request loads the model again, until an operator does.
        """
        if self.is_known(change):
            return
        if ":" in name:
            self._change_adapter("unload", name, "", change, timeout_s)
            return
        serving = self._catalog.serving(name)
        if self._catalog.loading(name):
            raise Conflict(f"model {name!r} is being loaded; wait for that", "target")
        if serving is None and self._catalog.may_load(name):
            self._catalog.withhold(name, Outcome(change, "unload", name))
            return
        if serving is None:
            raise _not_loaded(name, self._catalog.names)
        self._catalog.retire(serving.id, change, self._wall() + timeout_s)
        self._readiness.notify()
        self.on_begun()
        log.info("unloading", extra={"version": serving.id, "in_flight": self._in_flight.on_version(serving.id)})

    def phase(self, name: str) -> str:
        """What the load of a model is doing; "" if there is none."""
        return next((change.phase for change in self._changes.values() if change.name == name), "")

    def report(self, change: str) -> dict[str, Any]:
        """Return `done` and the outcome or the progress of a change. Raises the error of a change that failed."""
        if change in self._failed:
            raise self._failed[change]
        outcome = self._catalog.outcome(change)
        if outcome is not None:
            if outcome.code:
                raise StarlingError(outcome.code, outcome.message, outcome.param)
            return {"done": True, **_outcome_fields(outcome)}
        known = self._changes.get(change)
        if known is not None:
            return {"done": False, "phase": known.phase}
        retiring = next((version for version in self._catalog.retiring() if version.change == change), None)
        if retiring is not None:
            return {"done": False, "phase": f"{self._in_flight.on_version(retiring.id)} requests are in flight"}
        raise ModelUnavailable(f"there is no change {change!r}, or its outcome is no longer stored")

    def state(self) -> list[dict[str, Any]]:
        """Return the fields of every version, for administrators."""
        return [
            {
                "model": version.name,
                "instance": version.id,
                "state": version.state,
                "digest": version.digest or None,
                "path": version.settings.path or None,
                "in_flight": self._in_flight.on_version(version.id),
                "worker_groups": worker_groups.count(self._config, version.settings, version.name),
                "adapters": {one.name: dict(version.adapters).get(one.name) for one in version.settings.adapters},
            }
            for version in self._catalog.all
        ]

    def is_known(self, change: str) -> bool:
        """Whether a change of that id was begun, here or by an earlier gateway, and its outcome is still stored."""
        return (
            change in self._changes
            or change in self._failed
            or self._catalog.outcome(change) is not None
            or any(version.change == change for version in self._catalog.all)
        )

    # ---------------------------------------------------------------- loads in progress

    def _change_adapter(self, op: Op, name: str, path: str, change: str, timeout_s: float) -> None:
        renew = partial(adapter_settings, self._catalog, op, name, path)
        self._start_load("reload", renew(), change, timeout_s, AdapterChange(name.partition(":")[2], renew))

    def _start_load(
        self, op: Op, settings: ModelConfig, change: str, timeout_s: float, of_adapter: AdapterChange | None = None
    ) -> Change:
        if len(self._changes) >= MAX_CHANGES:
            raise Conflict(f"{MAX_CHANGES} changes are in progress; wait for them", "target")
        is_checked = op != "demand" and not self._catalog.loading() and not self._catalog.retiring()
        if is_checked:
            # No version will free memory, so what does not fit now will not fit later.
            self._steps.check_memory(settings)
        is_next = is_checked and not self._changes  # nothing takes memory between this check and the load
        until = self._wall() + timeout_s
        steps = self._load(change, op, settings, until, of_adapter, is_next)
        return self._start(Change(change, op, settings.name), steps)

    def _start(self, change: Change, steps: Coroutine[Any, Any, None]) -> Change:
        self._changes[change.id] = change
        change.task = asyncio.get_running_loop().create_task(self._run(change, steps))
        return change

    async def _run(self, change: Change, steps: Coroutine[Any, Any, None]) -> None:
        try:
            await steps
        except StarlingError as error:
            self._fail(change, error)
        except Exception:
            log.exception("a change failed")
            self._fail(change, InternalError("internal error of the gateway; its log has the details"))
        finally:
            self._changes.pop(change.id, None)
            asyncio.get_running_loop().call_soon(self._readiness.notify)  # when the task is done

    def _fail(self, change: Change, error: StarlingError) -> None:
        change.error = error
        if change.op != "demand" and self._catalog.outcome(change.id) is None:
            self._failed[change.id] = error
            while len(self._failed) > MAX_CHANGES:
                del self._failed[next(iter(self._failed))]
        log.error(
            "a change of the models failed", extra={"op": change.op, "model": change.name, "reason": error.message}
        )
        if change.op == "demand":
            self.on_demand_failed(change.name, error)

    async def _load(
        self,
        change: str,
        op: Op,
        settings: ModelConfig,
        until: float,
        of_adapter: AdapterChange | None,
        is_checked: bool = False,
    ) -> None:
        """Load a version from the start. Raises `StarlingError`; the version is not in the catalog then.

        is_checked: its memory has just been.
        """
        async with self._load_lock:
            is_serving = self._catalog.serving(settings.name) is not None
            if is_serving and op == "demand":
                return
            if is_serving != (op == "reload"):
                what = "loaded" if is_serving else "unloaded"
                raise Conflict(f"model {settings.name!r} was {what} in the meantime", "target")
            if of_adapter is not None:
                settings = of_adapter.renew()  # another change may have come first
            check_slug(self._catalog, settings)
            if op == "demand":
                await self._make_room(change, settings)
            elif not is_checked or of_adapter is not None:
                await self._steps.wait_for_memory(change, settings, until)
            digest = known_digest(settings)
            like = self._catalog.serving(settings.name) if of_adapter is not None else None
            renewed = of_adapter.name if of_adapter is not None else ""
            new = self._catalog.begin(settings, change, op, until, like, renewed, digest)
            self.on_begun()
            log.info("loading", extra={"version": new.id, "path": settings.path, "op": op})
            await self._steps.finish(new)

    async def _make_room(self, change: str, settings: ModelConfig) -> None:
        """Make room for a model that requests wait for. Raises `StarlingError`, also if an operator unloads it."""

        def report(phase: str) -> None:
            self._set_phase(change, phase)
            if not self._catalog.may_load(settings.name):
                raise _not_loaded(settings.name, self._catalog.names)

        report("waiting for memory")
        await self._eviction.make_room(settings, report)
        report("waiting for memory")

    def _continue(self, version: ModelVersion) -> Change:
        log.warning("continuing a load of an earlier gateway", extra={"version": version.id})
        return self._start(Change(version.change, version.op, version.name), self._continue_load(version))

    async def _continue_load(self, new: ModelVersion) -> None:
        """Finish a load that another gateway process has begun."""
        async with self._load_lock:
            await self._steps.finish(new)

    def _set_phase(self, change: str, phase: str) -> None:
        known = self._changes.get(change)
        if known is not None:
            known.phase = phase

    def _end_requests(self, version_id: str, error: StarlingError) -> None:
        """A version that requests were waiting for could not be loaded."""
        version = self._catalog.get(version_id)
        name = version.name if version is not None else version_id
        self._lifecycle.end_all(load_errors.for_requests(name, error), version=version_id)

    # ---------------------------------------------------------------- periodic work

    def tick(self) -> None:
        """Continue loads of an earlier gateway, pin files, drop retired versions. At each tick, in the event loop."""
        for version in self._catalog.loading():
            if version.change not in self._changes:
                self._continue(version)
        self._pin_files()
        self._eviction.tick()
        for version in self._catalog.retiring():
            self._retire(version)

    def _pin_files(self) -> None:
        """Store the file digest of each configured version, once all stages have opened the same file."""
        for version in self._catalog.all:
            state, described = self._loaded.states.get(version.id), self._loaded.described.get(version.id)
            if state is None or described is None or not state.ready:
                continue
            is_pinned = bool(version.digest) and dict(version.adapters) == dict(state.adapters)
            if not is_pinned and state.digest == described.digest:
                try:
                    self._catalog.pin(version.id, state.digest, state.adapters)
                except ResourceError as error:
                    log.debug(
                        "a change of the models waits", extra={"version": version.id, "reason": error.message}
                    )  # retried at the next tick

    def _retire(self, version: ModelVersion) -> None:
        """End the requests of a retiring version after its timeout; drop it when it has none."""
        if version.until and self._wall() >= version.until:
            error = StarlingError(
                "DRAINING",
                f"model {version.name} was unloaded before this request had finished; send it again",
                retry_after_s=UNLOAD_RETRY_AFTER_S,
            )
            ended = self._lifecycle.end_all(error, version=version.id)
            self._ended[version.id] = self._ended.get(version.id, 0) + ended
        if self._in_flight.on_version(version.id):
            return
        outcome = None
        if version.op == "unload" and version.change:
            outcome = Outcome(
                version.change,
                version.op,
                version.name,
                version.id,
                version.digest,
                ended=self._ended.pop(version.id, 0),
            )
        try:
            self._steps.drop(version.id, outcome)
        except ResourceError as error:
            log.debug(
                "a change of the models waits", extra={"version": version.id, "reason": error.message}
            )  # retried at the next tick
            return
        log.info("unloaded", extra={"version": version.id})
        if version.change and not self._catalog.versions(version.name):
            self.on_unloaded(version.name)


def new_change_id() -> str:
    """Return a random id for a change."""
    return secrets.token_hex(8)


def _outcome_fields(outcome: Outcome) -> dict[str, Any]:
    return {
        "op": outcome.op,
        "model": outcome.name,
        "instance": outcome.version,
        "digest": outcome.digest or None,
        "previous": outcome.previous or None,
        "ended": outcome.ended,
    }


def _not_loaded(name: str, names: list[str]) -> ModelNotFound:
    return ModelNotFound(f"model {name!r} is not loaded; loaded: {', '.join(names) or 'none'}", "target")
