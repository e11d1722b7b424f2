"""Which models are unloaded without an operator: idle ones after their time, and the least recently used ones for room.

    idle     no request uses the model, and the time of its last requests (`keep_alive`) is over
    room     a model is to be loaded and does not fit: idle models go, the least recently used first

A model with requests never goes, nor does a pinned one, nor one that drafts for a loaded model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ModelUnavailable, ResourceError
from pipeline.models import capacity, weight_copies, worker_groups
from pipeline.models.versions import ModelVersion
from stages.gateway.admission.in_flight import InFlight
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.load_steps import MeasureMemory
from stages.gateway.versions.model_use import ModelUse

log = logging.getLogger("starling.gateway.loader")

POLL_S = 0.1  # between two checks of the free memory
BUSY_RETRY_AFTER_S = 5.0


class Eviction:
    """One per gateway. `clock` is monotonic, in s."""

    def __init__(
        self,
        config: Config,
        catalog: VersionCatalog,
        in_flight: InFlight,
        use: ModelUse,
        measure: MeasureMemory,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._in_flight = in_flight
        self._use = use
        self._measure = measure
        self._clock = clock
        self.on_retired: Callable[[], object] = lambda: None  # called when a model's unloading has begun

    def tick(self) -> None:
        """At each tick: unload the models whose time is over."""
        now = self._clock()
        for version in self._catalog.all:
            if version.state != "serving":
                continue
            self._use.loaded(version.name, version.id, self._catalog.loadable.keep_alive_s(version.settings))
            if now >= self._use.end(version.name) and self._may_go(version) and self._is_idle(version):
                self._unload(version, "idle")

    async def make_room(self, settings: ModelConfig, report: Callable[[str], None]) -> None:
        """Unload idle models until another one fits; wait for those that have requests, up to `on_demand.wait_ms`.

        Raises `ResourceError` if it would not fit without all of them, and `ModelUnavailable` if they stay in use.
        """
        deadline = self._clock() + self._config.on_demand.wait_ms / 1000
        while (problem := self._problem(settings)) is not None:
            retiring = self._catalog.retiring()
            victims = self._candidates()
            if not retiring:
                self._check_gain(settings, victims, problem)
            idle = [version for version in victims if self._is_idle(version)]
            # A retiring version without requests is about to free its memory.  One with requests may take hours.
            # Requests of its model's other versions do not keep it.
            is_leaving = not all(self._in_flight.on_version(version.id) for version in retiring)
            if not is_leaving and idle and (not retiring or self._suffices(settings, idle)):
                self._unload(idle[0], f"room for {settings.name}")
            elif is_leaving and self._clock() < deadline:
                report("waiting for the memory of a model that is being unloaded")
            elif self._clock() >= deadline:
                raise ModelUnavailable(
                    f"model {settings.name!r} does not fit beside models that have requests: {problem.message}",
                    "model",
                    retry_after_s=BUSY_RETRY_AFTER_S,
                )
            else:
                report("waiting for a model that has requests, to unload it")
            await asyncio.sleep(POLL_S)

    # ---------------------------------------------------------------- what fits

    def _problem(self, settings: ModelConfig) -> ResourceError | None:
        """Why another model cannot be loaded now; None if it can."""
        most = self._config.on_demand.max_models
        loaded = len(self._catalog.all)
        if most and loaded >= most:
            return ResourceError(f"{loaded} models are loaded, the most that may be (on_demand.max_models)", "model")
        try:
            self._check(settings, set())
        except ResourceError as error:
            return error
        return None

    def _check(self, settings: ModelConfig, gone: set[str]) -> None:
        """Raise `ResourceError` if the model would not fit without the versions `gone`."""
        plans = {one.id: self._plan(one) for one in self._catalog.all}
        run_dir = paths.run_dir(self._config)
        copies = {one.id: self._copies(run_dir, one) for one in self._catalog.all}
        free = self._measure(self._config)
        freed = sum(plans[one].arenas for one in gone)
        freed_adapters = sum(plans[one].adapters for one in gone)
        freed_copies = sum(sum(copies[one]) for one in gone)
        # A group that has copies uses the file's pages no more, and has freed what it had read of the file.
        if self._config.performance.use_mmap:
            freed_weights = 0
            mapped = sum(plan.weights for one, plan in plans.items() if one not in gone and not all(copies[one]))
        else:  # they are in memory, which is not available
            freed_weights = sum(plans[one].weights // len(copies[one]) * copies[one].count(0) for one in gone)
            mapped = 0
        memory = free.memory + freed + freed_adapters + freed_weights + freed_copies
        free = free._replace(arenas=free.arenas + freed, memory=memory)
        capacity.check_plan(self._config, settings.name, capacity.plan(self._config, settings), free, mapped)

    def _plan(self, version: ModelVersion) -> capacity.MemoryPlan:
        """What a version takes, of the file that it was loaded from.

        By the model's name: by that, and not by the id, another model has it as draft model.
        """
        model = msgspec.structs.replace(version.model, name=version.name)
        return capacity.plan(self._config, model)

    def _copies(self, run_dir: Path, version: ModelVersion) -> list[int]:
        """Bytes of the copies that each worker group of a version has of its weights; 0: it has none."""
        found = [weight_copies.of(run_dir, one.stage) for one in worker_groups.of_version(self._config, version)]
        return [one.nbytes if one is not None else 0 for one in found]

    def _suffices(self, settings: ModelConfig, idle: list[ModelVersion]) -> bool:
        """Whether the model fits without the idle ones alone."""
        try:
            self._check(settings, {version.id for version in idle})
        except ResourceError:
            return False
        return True

    def _check_gain(self, settings: ModelConfig, victims: list[ModelVersion], problem: ResourceError) -> None:
        """Raise `ResourceError` if the model does not fit even without all the others that may go."""
        try:
            if not victims:
                raise problem
            self._check(settings, {version.id for version in victims})
        except ResourceError as error:
            names = ", ".join(version.name for version in victims) or "none"
            raise ResourceError(
                f"{problem.message}. What may be unloaded for it ({names}) "
                + ("does not suffice" if victims else "frees no memory"),
                error.param,
            ) from None

    # ---------------------------------------------------------------- what may go

    def _candidates(self) -> list[ModelVersion]:
        """The versions that may be unloaded, the least recently used first."""
        found = [one for one in self._catalog.all if one.state == "serving" and self._may_go(one)]
        return sorted(found, key=lambda one: self._use.idle_since(one.name))

    def _may_go(self, version: ModelVersion) -> bool:
        """Whether the version may be unloaded once it is idle."""
        loaded = [one.settings.draft_model for one in self._catalog.all if one.state != "retiring"]
        return not (version.settings.pinned or version.name in loaded or self._catalog.loading(version.name))

    def _is_idle(self, version: ModelVersion) -> bool:
        """Whether no request uses the version or is being admitted to its model."""
        return not (self._in_flight.of_model(version.name) or self._in_flight.on_version(version.id))

    def _unload(self, version: ModelVersion, why: str) -> None:
        try:
            self._catalog.retire_idle(version.id)
        except ResourceError as error:
            log.debug(
                "a change of the models waits", extra={"version": version.id, "reason": error.message}
            )  # retried at the next tick
            return
        self._use.unloaded(version.name)
        log.info("unloading a model", extra={"version": version.id, "reason": why})
        self.on_retired()
