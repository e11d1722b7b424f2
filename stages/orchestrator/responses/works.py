"""What an orchestrator has of responses: their store, what runs in the background, and what the elected one removes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pipeline.api.held_bytes import body_shares
from pipeline.blobs.address import open_responses
from pipeline.config.schema import Config
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import StarlingError
from stages.orchestrator.front import Front
from stages.orchestrator.relay import Relay
from stages.orchestrator.responses.background import Background
from stages.orchestrator.responses.heads import Heads
from stages.orchestrator.responses.job_runner import JobRunner
from stages.orchestrator.responses.jobs import Jobs
from stages.orchestrator.responses.shared import SharedResponses
from stages.orchestrator.responses.tenant_blobs import TenantBlobs
from stages.orchestrator.responses.use import ResponseUse

log = logging.getLogger("starling.orchestrator")

SWEEP_S = 600.0  # between two checks for expired responses


class ResponseWorks:
    """One per orchestrator. `wall`: s since 1970; `clock`: monotonic, s."""

    def __init__(
        self, config: Config, store: CoordinationStore, wall: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        """Raises `ConfigError`."""
        # None: there is no place that all orchestrators would share.
        self.shared: SharedResponses | None = None
        self._config = config
        self._coordination = store
        self._wall = wall
        self._clock = clock
        self._blobs = open_responses(config)
        self._background: Background | None = None
        self._swept = float("-inf")
        self._sweeping: asyncio.Task[None] | None = None
        if self._blobs is not None:
            bounds = config.stored_responses
            use = ResponseUse(store, bounds.tenant_mb << 20, bounds.max_size_mb << 20, wall)
            place = TenantBlobs(self._blobs, use, Heads(store), bounds, wall)
            jobs = Jobs(store, self._blobs, wall)
            self.shared = SharedResponses(place, jobs, store, wall)

    def attach(self, front: Front, relay: Relay, identity: str) -> None:
        """Let clients use it. `identity`: of this orchestrator."""
        if self.shared is not None:
            server = self._config.server
            total = server.body_buffer_mb << 20
            self._background = front.responses.background = Background(
                self._coordination,
                self.shared.jobs,
                self.shared.store,
                self.shared.keeper,
                JobRunner(relay, front.quotas, front.locate_job, front.traffic).run,
                identity,
                self._wall,
                timeout_s=server.request_timeout_ms / 1000,
                max_open=self._config.fleet.orchestrator.max_concurrent_requests,
                bodies=body_shares(server, lambda: front.share_of("", total) == total),  # if there is one tenant
            )

    async def run(self) -> None:
        """Run what is in the background, without end."""
        if self._background is not None:
            await self._background.run()

    def sweep_if_due(self, *, is_store_up: bool) -> None:
        """Begin to remove what has expired, now and then."""
        is_running = self._sweeping is not None and not self._sweeping.done()
        if is_store_up and self.shared is not None and not is_running and self._clock() - self._swept >= SWEEP_S:
            self._swept = self._clock()
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep(self.shared))

    async def _sweep(self, shared: SharedResponses) -> None:
        try:
            await shared.place.sweep()
            await shared.jobs.sweep(self._config.server.request_timeout_ms / 1000)
        except StarlingError as error:
            log.warning("stored responses were not swept", extra={"reason": error.message})

    async def close(self) -> None:
        """Leave what runs in the background to other orchestrators, and end the turns of conversations."""
        if self._background is not None:
            await self._background.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        if self.shared is not None:
            await self.shared.turns.close()

    async def close_store(self) -> None:
        """Release connections, when all requests have ended."""
        if self._blobs is not None:
            await self._blobs.close()
