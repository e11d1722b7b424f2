"""What the orchestrator reads from the coordination store: agents, cordons, placements, quotas, as they change.

    follow   applies the store's updates; while it is down, what is known stays
    probe    asks the store now and then: a watch alone does not notice one that takes no writes
    settle   forgets agents that a store has lost and that do not come back

After an outage a store has ended the leases that could not be renewed, or is a new one without any.  Agents that still
answer are then kept until they have registered again: their streams go on.  Without sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

import msgspec

from pipeline.coordination.interface import Change, CoordinationStore, Event, Update
from pipeline.errors import ConfigError, StorageUnavailable
from pipeline.fleet import records
from pipeline.fleet.records import AGENTS, AgentRecord
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.fleet_api import CORDONS, PLACEMENTS, EventLog, FleetApi, Placement
from stages.orchestrator.key_claims import CLAIMS
from stages.orchestrator.quotas.use_record import QUOTAS
from stages.orchestrator.registry import Cordon, Registry
from stages.orchestrator.responses.use import PREFIX as RESPONSES

log = logging.getLogger("starling.orchestrator")

RETRY_S = 0.5
PROBE_S = 1.0  # between two questions, and for an answer
KEPT_S = 30.0  # for an agent to register again after an outage of the store, if its last answer is not older
LEADER_KEY = "orchestrators/leader"


class StoreFollower:
    """One per orchestrator. `clock` is monotonic, s."""

    def __init__(
        self,
        store: CoordinationStore,
        registry: Registry,
        events: EventLog,
        clock: Callable[[], float],
        lose_agent: Callable[[str, str], object],
        on_left: Callable[[AgentRecord, float], object],
        on_joined: Callable[[str], object],
        on_change: Callable[[], object],
        apply_quotas: Callable[[Update], object],
    ) -> None:
        """`lose_agent(id, reason)`: its requests go on elsewhere. `on_left(record, age)`: it is registered no
        more, and has answered last `age` s ago. `on_joined(id)`: it is new, or has started anew.
        """
        self.fleet: FleetApi  # which shows placements and the store's state
        self._store = store
        self._registry = registry
        self._events = events
        self._clock = clock
        self._lose_agent = lose_agent
        self._on_left = on_left
        self._on_joined = on_joined
        self._on_change = on_change
        self._apply_quotas = apply_quotas
        self._cordons: dict[str, Cordon] = {}
        self._missing: dict[str, float] = {}  # agents that answer and are not in the store: when they are forgotten
        self._recovered_until = float("-inf")  # until when missing agents may be an outage's doing

    # ---------------------------------------------------------------- the store's state

    async def follow(self) -> None:
        """Apply updates without end."""
        while True:
            try:
                async with contextlib.aclosing(self._store.watch("")) as updates:  # type: ignore[type-var]
                    async for update in updates:
                        await self._apply(update)
            except (StorageUnavailable, ConfigError) as error:
                self._set_up(False, error.message)
                await asyncio.sleep(RETRY_S)

    async def probe(self) -> None:
        """Find out without end whether the store answers."""
        while True:
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._store.get(LEADER_KEY)
                self._set_up(True)
            except TimeoutError:
                self._set_up(False, f"it has not answered within {PROBE_S:g} s")
            except (StorageUnavailable, ConfigError) as error:
                self._set_up(False, error.message)
            await asyncio.sleep(PROBE_S)

    def _set_up(self, is_up: bool, reason: str = "") -> None:
        if is_up == self.fleet.is_store_up:
            return
        self.fleet.is_store_up = is_up
        if is_up:
            self._recovered_until = self._clock() + KEPT_S
            self._events.add("store-up")
            log.info("the coordination store answers again")
        else:
            self._events.add("store-down", text=reason)
            log.error("the coordination store is down", extra={"reason": str(reason)})

    async def write(self, key: str, value: bytes | None) -> None:
        """Put a value into the store; None deletes it."""
        await self._store.transact((), (Change(key, value),))

    # ---------------------------------------------------------------- updates

    async def _apply(self, update: Update) -> None:
        self._apply_quotas(update)
        if not update.is_snapshot and all(event.key.startswith((CLAIMS, QUOTAS, RESPONSES)) for event in update.events):
            return
        if update.is_snapshot:
            keys = {event.key for event in update.events}
            for record in await self._registry.discover_nodes():
                if records.agent_key(record.agent_id) not in keys:
                    self._gone(record.agent_id, may_be_outage=True)
            self._cordons = {}
            self.fleet.placements = {}
        for event in update.events:
            try:
                await self._apply_event(event)
            except (ConfigError, *DECODE_ERRORS) as error:
                log.error("a value of the store is not used", extra={"key": event.key, "reason": str(error)})
        self._registry.set_cordons(dict(self._cordons))
        self._on_change()

    async def _apply_event(self, event: Event) -> None:
        if event.key.startswith(AGENTS):
            if event.value is None:
                is_outage = not self.fleet.is_store_up or self._clock() < self._recovered_until
                self._gone(event.key.removeprefix(AGENTS), may_be_outage=is_outage)
                return
            record = records.decode(event.key, event.value)
            self._missing.pop(record.agent_id, None)
            known = self._registry.find(record.agent_id)
            if known is not None and known.incarnation != record.incarnation:
                self._lose_agent(record.agent_id, "the agent has started anew")
            await self._registry.register_node(record)
            if known != record:
                self._events.add("agent-joined", agent=record.agent_id, text=record.url)
                self._on_joined(record.agent_id)
        elif event.key.startswith(CORDONS):
            agent = event.key.removeprefix(CORDONS)
            self._cordons.pop(agent, None)
            if event.value is not None:
                self._cordons[agent] = msgspec.json.decode(event.value, type=Cordon)
        elif event.key.startswith(PLACEMENTS):
            self.fleet.placements.pop(event.key, None)
            if event.value is not None:
                self.fleet.placements[event.key] = msgspec.json.decode(event.value, type=Placement)

    # ---------------------------------------------------------------- agents that leave

    def _gone(self, agent_id: str, *, may_be_outage: bool) -> None:
        if may_be_outage and self._answers(agent_id):
            self._missing.setdefault(agent_id, self._clock() + KEPT_S)
        else:
            self._leave(agent_id)

    def settle(self) -> None:
        """Forget missing agents that no longer answer, or whose time is over. Call with every poll."""
        for agent_id, until in list(self._missing.items()):
            if not self.fleet.is_store_up:
                self._missing[agent_id] = self._clock() + KEPT_S  # it cannot register
            elif self._clock() >= until or not self._answers(agent_id):
                self._leave(agent_id)
                self._on_change()

    def _answers(self, agent_id: str) -> bool:
        return self._age_s(agent_id) < KEPT_S

    def _leave(self, agent_id: str) -> None:
        self._missing.pop(agent_id, None)
        record, age_s = self._registry.find(agent_id), self._age_s(agent_id)
        if record is not None and self._registry.remove_node(agent_id):
            self._events.add("agent-left", agent=agent_id)
            self._on_left(record, age_s)

    def _age_s(self, agent_id: str) -> float:
        """Of the agent's last answer, s."""
        return min((one.age_s for one in self._registry.health() if one.agent_id == agent_id), default=math.inf)
