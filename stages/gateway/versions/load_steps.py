"""The steps of loading one version: capacity, table entry, readiness, self-test, switch.

    wait_for_memory   until the arenas of the new version fit
    catalog.begin     the version is in the table, and every stage loads its part
    wait_until_ready  until its worker, its pages and its vocabulary are ready
    self_test         it generates, and equals the serving version if that is of the same file; not on demand, where a
                      request waits for the version, as at a fresh start; a short one is sent before it is ready
    catalog.switch    new requests go to it

A step that fails raises `StarlingError`; the version is then dropped, and the serving version keeps serving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import InvalidRequest, ModelUnavailable, ResourceError, StarlingError
from pipeline.models import capacity, versions, worker_groups
from pipeline.models.versions import ModelVersion, Outcome
from stages.gateway.admission.server_readiness import ServerReadiness
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.loaded_versions import LoadedVersions
from stages.gateway.versions.self_test import EarlyProbe, SelfTest

log = logging.getLogger("starling.gateway.loader")

READY_POLL_S = 0.05  # between two checks for a stage's failure; readiness itself wakes the load
RETRY_S = 0.2  # between two checks of the free memory, and between two self-tests
SELF_TEST_RETRY_S = 60.0  # the self-test is not repeated after that time
TRANSIENT = ("MODEL_UNAVAILABLE", "OVERLOADED")  # errors after which the self-test is repeated

MeasureMemory = Callable[[Config], capacity.FreeMemory]
ReportPhase = Callable[[str, str], None]  # (change id, phase)
EndRequests = Callable[[str, StarlingError], None]  # (version id, why it could not be loaded)


class LoadSteps:
    """One per loader. `wall` is s since 1970; `report_phase` receives what a change is waiting for."""

    def __init__(
        self,
        config: Config,
        catalog: VersionCatalog,
        loaded: LoadedVersions,
        readiness: ServerReadiness,
        self_test: SelfTest,
        measure: MeasureMemory,
        wall: Callable[[], float],
        report_phase: ReportPhase,
        end_requests: EndRequests,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._loaded = loaded
        self._readiness = readiness
        self._self_test = self_test
        self._measure = measure
        self._wall = wall
        self._report_phase = report_phase
        self._end_requests = end_requests

    def check_memory(self, settings: ModelConfig) -> None:
        """Raise `ResourceError` if the arenas of a version with these settings do not fit now."""
        capacity.check(self._config, settings, self._measure(self._config))

    async def wait_for_memory(self, change: str, settings: ModelConfig, until: float) -> None:
        """Wait while retiring versions can still free memory. Raises `ResourceError` if the version does not fit."""
        while True:
            try:
                self.check_memory(settings)
                return
            except ResourceError:
                if not self._catalog.retiring() or self._wall() >= until:
                    raise
            self._report_phase(change, "waiting for a retiring version to free memory")
            await asyncio.sleep(RETRY_S)

    async def finish(self, new: ModelVersion) -> None:
        """Take a version from loading to serving, or drop it and raise `StarlingError`."""
        try:
            early = await self._wait_until_ready(new)
            if new.op != "demand":
                self._report_phase(new.change, "self-test")
                await self._test(new, early)
            if self._wall() >= new.until:
                raise _timed_out(new)
            self._pin(new)
            old = self._catalog.switch(new.id)
        except StarlingError as error:
            serving = self._catalog.serving(new.name)
            message = error.message + (f"; {serving.id} keeps serving" if serving is not None else "")
            outcome = Outcome(
                new.change,
                new.op,
                new.name,
                new.id,
                previous=serving.id if serving is not None else "",
                code=error.code,
                message=message,
                param=error.param,
            )
            if new.op == "demand":
                self._end_requests(new.id, error)
            self.drop(new.id, outcome if new.op != "demand" else None)
            raise StarlingError(error.code, message, error.param) from None
        self._readiness.notify()
        log.info(
            "serving a new version",
            extra={"model": new.name, "version": new.id, "previous": old.id if old is not None else None},
        )

    def drop(self, version_id: str, outcome: Outcome | None) -> None:
        """Remove a version from the catalog, with the outcome of its change. Raises `ResourceError`."""
        self._catalog.drop(version_id, outcome)
        self._loaded.forget(version_id)

    async def _test(self, new: ModelVersion, early: EarlyProbe | None) -> None:
        """Run the self-test, again after an error that a restarted stage explains."""
        deadline = min(new.until, self._wall() + SELF_TEST_RETRY_S)
        while True:
            try:
                await self._self_test.check(new, self._catalog.serving(new.name), early)
                return
            except StarlingError as error:
                if error.code not in TRANSIENT or self._wall() >= deadline:
                    raise
                log.info("repeating the self-test", extra={"version": new.id, "reason": error.message})
            finally:
                if early is not None:
                    early.cancel()  # if it has not ended
                early = None
            await asyncio.sleep(RETRY_S)

    async def _wait_until_ready(self, new: ModelVersion) -> EarlyProbe | None:
        """Wait until worker, pages and vocabulary are ready, and begin the self-test meanwhile.

        Raises the error of the stage that failed.
        """
        early: EarlyProbe | None = None
        try:
            while not self._loaded.is_ready(new):
                if early is None and new.op != "demand" and new.id in self._loaded.described:
                    early = self._self_test.begin(new, self._catalog.serving(new.name))
                await self._wait_for_change(new)
        except BaseException:
            if early is not None:
                early.cancel()
            raise
        return early

    async def _wait_for_change(self, new: ModelVersion) -> None:
        """Wait for the next report of a stage. Raises the error of the stage that failed."""
        run_dir = paths.run_dir(self._config)
        state = self._loaded.states.get(new.id)
        self._pin(new)
        groups = worker_groups.of_version(self._config, new)
        failures = [versions.read_failure(run_dir, group.stage) for group in groups]
        failure = failures[0] if all(failures) else None  # else another group makes it ready
        if failure is not None and failure.code == "CONFIG":
            raise InvalidRequest(failure.message, "path")  # the file is the caller's to change
        if failure is not None:
            raise StarlingError(failure.code, failure.message, failure.param)
        error = self._loaded.refused.get(new.id)
        if error is not None and error.code not in ("MODEL_UNAVAILABLE", "MODEL_NOT_FOUND"):
            raise error
        reason = state.reason if state is not None else "its worker is starting"
        self._report_phase(new.change, f"loading: {reason or 'its vocabulary is being loaded'}")
        if self._wall() >= new.until:
            raise _timed_out(new, reason)
        self._readiness.describe_missing()  # at once: a digest that has just become known allows it
        await self._readiness.wait_for_change(READY_POLL_S)

    def _pin(self, new: ModelVersion) -> None:
        """Bind a version to the files that its worker has opened, if it is not. Raises `ResourceError`."""
        state, current = self._loaded.states.get(new.id), self._catalog.get(new.id)
        if state is None or current is None or not state.digest:
            return
        if not current.digest or (state.adapters and dict(current.adapters) != dict(state.adapters)):
            self._catalog.pin(new.id, state.digest, state.adapters)


def _timed_out(new: ModelVersion, reason: str = "") -> StarlingError:
    why = f" ({reason})" if reason else ""
    return ModelUnavailable(f"{new.id} was not ready in time{why}; allow more time with --timeout")
