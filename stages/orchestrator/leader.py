"""What the elected orchestrator does: placements, unloads of idle models, and rounds of other parts.

    campaign   wait for a term
    look       once a second: loads that placements need, models that leave, the rounds
    end        of the term: its changes of agents are cancelled before another orchestrator can lead

Calls to agents carry no fence.  So nothing is begun, and no further call of a load is made, once the term has ended by
a clock that counts suspension; a process that is stopped in the midst of a call may still have sent it.  Without
sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from pipeline.coordination.election import Election, Term
from pipeline.errors import ConfigError, StarlingError
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.fleet_api import EventLog, FleetApi
from stages.orchestrator.idle_models import IdleModels
from stages.orchestrator.memory_pressure import MemoryPressure
from stages.orchestrator.model_changes import ModelChanges
from stages.orchestrator.placement import Load, copies, missing_loads, stalled_loads
from stages.orchestrator.registry import Registry
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.session_moves import keeps_models

log = logging.getLogger("starling.orchestrator")

CHECK_S = 1.0  # between two checks of the placements
IDLE_REASON = "it had no requests for fleet.orchestrator.unload_idle_ms"


class Leader:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self,
        election: Election,
        identity: str,
        fleet: FleetApi,
        registry: Registry,
        router: ScoreRouter,
        cold: ColdLoads,
        changes: ModelChanges,
        has_told: Callable[[str, str], bool],
        events: EventLog,
        idle_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`has_told(agent, model)`: whether a load of this process signs URLs for it. `idle_s`: 0: idle models stay."""
        self.rounds: tuple[Callable[[], object], ...] = ()  # what else is done at each look
        self._election = election
        self._identity = identity
        self._fleet = fleet
        self._registry = registry
        self._router = router
        self._cold = cold
        self._changes = changes
        self._has_told = has_told
        self._events = events
        self._idle_s = idle_s
        self._idle = IdleModels(clock, router.under_way)
        self._pressure = MemoryPressure(self._idle)
        self._under_way: dict[str, asyncio.Task[None]] = {}  # changes, by agent
        self._unmet: set[str] = set()  # placed models that no agent can load

    async def lead(self, until_ready: Callable[[], Awaitable[object]]) -> None:
        """Lead whenever this orchestrator is elected, without end. `until_ready()`: before the first term."""
        await until_ready()
        while True:
            try:
                term = await self._election.campaign()
            except ConfigError as error:
                log.error("no leader can be elected", extra={"reason": error.message})
                await asyncio.sleep(CHECK_S)
                continue
            self._events.add("leader", text=self._identity)
            holding = asyncio.get_running_loop().create_task(self._election.hold(term))
            try:
                while term.is_valid:
                    self._fleet.is_leader = True
                    self._look(term)
                    await asyncio.wait({holding}, timeout=CHECK_S)
            finally:
                self._fleet.is_leader = False
                term.end()
                await self._cancel_changes()
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)

    def _look(self, term: Term) -> None:
        is_up = self._fleet.is_store_up
        # An agent that has not answered yet may have what is placed.
        if is_up and not self._registry.awaits_answers():
            self._place(term)
        for begin_round in self.rounds:
            begin_round()
        self._idle.observe(self._router.table)
        if is_up:
            self._unload()

    def _place(self, term: Term) -> None:
        """Begin the loads that placements need."""
        wanted, cold = self._fleet.wanted(), self._cold
        cold.end_unwanted()
        due = self._missing(wanted)
        self._note_unmet(wanted, {load.model for load in due})
        stalled = stalled_loads(wanted, self._router.table, self._has_told)
        for load in [*due, *(one for one in stalled if one.agent_id not in cold.failed_at(one.model))]:
            self._start(load.agent_id, partial(self._load, load, term))

    def _missing(self, wanted: list[tuple[str, int]]) -> list[Load]:
        router, cold = self._router, self._cold
        return missing_loads(wanted, router.table, router.is_host, router.room_for, cold.agents_of, cold.failed_at)

    def _note_unmet(self, wanted: list[tuple[str, int]], due: set[str]) -> None:
        """Report placements that cannot be carried out, once each."""
        table, loading = self._router.table, self._cold.agents_of
        # Where a load has just failed, its event says why. One that is due alone waits for others at its agents.
        unmet = {
            model: f"{n_copies} of {replicas} replicas: no other agent has room, also without its idle models that are "
            "not placed"
            for model, replicas in wanted
            if model not in due
            and (n_copies := len(copies(model, table, loading))) < replicas
            and not self._cold.failed_at(model)
            and not self._missing([(model, replicas)])
        }
        for model in unmet.keys() - self._unmet:
            self._events.add("placement-unmet", model=model, text=unmet[model])
        self._unmet = set(unmet)

    async def _load(self, load: Load, term: Term) -> None:
        try:
            await self._cold.place(load.model, load.agent_id, lambda: term.is_valid and self._is_placed(load.model))
        except StarlingError as error:
            extra = {"model": load.model, "agent": load.agent_id, "reason": error.message}
            log.warning("a model was not placed", extra=extra)

    def _is_placed(self, model: str) -> bool:
        return any(name == model and replicas for name, replicas in self._fleet.wanted())

    def _unload(self) -> None:
        """Unload models that have had no requests for a while, or whose agent is short of memory."""
        table, stays = [view for view in self._router.table if not keeps_models(view)], self._router.eviction.stays
        unload = self._changes.unload_idle
        for agent_id, model in self._pressure.due(table, stays):
            self._start(agent_id, partial(unload, agent_id, model, "its agent is short of memory"))
        if self._idle_s:
            for agent_id, model in self._idle.due(table, self._idle_s, stays):
                self._start(agent_id, partial(unload, agent_id, model, IDLE_REASON))

    def _start(self, agent_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Change what is loaded on an agent, one change at a time."""
        if agent_id not in self._under_way:
            task = asyncio.get_running_loop().create_task(work())
            self._under_way[agent_id] = task
            task.add_done_callback(lambda done: self._under_way.pop(agent_id, None))

    async def _cancel_changes(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
