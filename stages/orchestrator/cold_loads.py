"""Loads of models that no agent has ready, for requests and placements: one of a model at each agent at a time.

    wait    join the load of a model, wherever it is, or start it; returns when it has ended
    place   join the load of a model at this agent, or start it
    end     loads at an agent that is lost: who waits for one begins another
    bound   `max_waiting` requests in all and half of them for one model, and a part of both for one of several
            tenants; more get 429 with an estimate, but for those whose engine has died
    failed  which agents have just failed to load a model: none of them is asked for a further copy (further_copies.py),
            or for a placement

The load itself is injected.  Without sockets.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable

from pipeline.api.adapter_names import base_of
from pipeline.errors import Overloaded, StarlingError
from stages.orchestrator.forward import NotRefused

FAILED_S = 30.0  # after a failure, until the agent may load a further copy of the model, or a placed one


class ColdLoad:
    """A load under way."""

    def __init__(
        self, model: str, agent_id: str, begun: float, predicted_s: float, is_wanted: Callable[[], bool]
    ) -> None:
        """`is_wanted`: false: it is for a placement that has ended, or of a leader whose term has."""
        self.model = model
        self.agent_id = agent_id
        self.begun = begun
        self.predicted_s = predicted_s
        self.n_waiting = 0
        self.of_tenant: Counter[str] = Counter()  # of them
        self.n_placing = 0  # placements that wait for it, too
        self.is_wanted: Callable[[], bool] = is_wanted
        self.task: asyncio.Task[None] | None = None
        self.ended = ""  # why it was ended here; "": it was not

    async def result(self) -> None:
        """Wait until it has ended. Raises `StarlingError`."""
        assert self.task is not None
        try:
            await asyncio.shield(self.task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if not self.ended or (waiter is not None and waiter.cancelling()):
                raise
            raise NotRefused(f"{self.model} was not loaded: {self.ended}", retry_after_s=1.0) from None


class ColdLoads:
    """One per orchestrator. `load(agent_id, model, evict)` raises `StarlingError`. `clock` is monotonic, s."""

    def __init__(
        self, load: Callable[[str, str, str | None], Awaitable[None]], max_waiting: int, clock: Callable[[], float]
    ) -> None:
        # How many of so many may be of a tenant.
        self.share_of: Callable[[str, int], int] = lambda tenant, most: most
        self._load = load
        self.max_waiting = max_waiting
        self._clock = clock
        self._loads: dict[tuple[str, str], ColdLoad] = {}  # by model and agent
        self._failed: dict[tuple[str, str], float] = {}  # until when that counts, s of the clock; likewise
        self.n_waiting = 0
        self._of_tenant: Counter[str] = Counter()  # of them
        self.started = self.done = self.failed = 0  # counts, for metrics

    def find(self, model: str) -> ColdLoad | None:
        """A load of the model, if one is under way."""
        return next((one for one in self._loads.values() if one.model == model), None)

    @property
    def under_way(self) -> list[ColdLoad]:
        """All loads."""
        return list(self._loads.values())

    def agents_of(self, model: str) -> set[str]:
        """The agents that load a model, or one of its adapters; "": that load any."""
        return {one.agent_id for one in self._loads.values() if model in ("", one.model, base_of(one.model))}

    def failed_at(self, model: str) -> set[str]:
        """The agents that have just failed to load a model."""
        now = self._clock()
        return {agent_id for (name, agent_id), until in self._failed.items() if name == model and until > now}

    def models_at(self, agent_id: str) -> set[str]:
        """What an agent loads: models, and adapters as MODEL:ADAPTER."""
        return {one.model for one in self._loads.values() if one.agent_id == agent_id}

    def is_wanted(self, model: str, agent_id: str) -> bool:
        """Whether a load that is under way is to go on: for requests, or the leader that places the model."""
        load = self._loads.get((model, agent_id))
        return load is None or load.is_wanted()

    async def wait(
        self,
        model: str,
        agent_id: str,
        evict: str | None = "",
        predicted_s: float = 0.0,
        on_join: Callable[[str], object] = lambda agent_id: None,
        tenant: str = "",
        *,
        is_admitted: bool = False,
    ) -> str:
        """Load the model, or wait for the load that is under way; the agent that has it. Raises `StarlingError`.

        `evict`: the model that leaves before; "": none must, None: none may.

        `on_join` is called with the agent that loads it, which may be another one than `agent_id`.  `tenant`: whose
        request waits; "": it is of none in particular.  `is_admitted`: an engine had it before: it is not refused.

        A waiter that is cancelled leaves the load to the others; without any it goes on as well: the next request for
        the model will find it.
        """
        load = self._loads.get((model, agent_id)) or self.find(model)
        waited = self._clock() - load.begun if load is not None else 0.0
        if load is not None and not load.predicted_s:  # begun for a placement
            load.predicted_s = waited + predicted_s
        if not is_admitted and (reached := self._reached(load, tenant)):
            left_s = max(1.0, (load.predicted_s if load is not None else 0.0) - waited)
            raise Overloaded(
                f"{reached}, fleet.orchestrator.max_waiting = {self.max_waiting}); try again in {math.ceil(left_s)} s",
                retry_after_s=left_s,
            )
        if load is None:
            load = self._begin(model, agent_id, evict, predicted_s, _always)
        load.is_wanted = _always
        self._count(load, tenant, 1)
        on_join(load.agent_id)
        try:
            await load.result()
            return load.agent_id
        finally:
            self._count(load, tenant, -1)

    async def place(self, model: str, agent_id: str, is_wanted: Callable[[], bool]) -> None:
        """Load a placed model on this agent, or wait for its load there. Raises `StarlingError`.

        `is_wanted`: false: the placement or the leader's term has ended, and with it a load that is begun here, unless
        a request has joined it meanwhile.
        """
        load = self._loads.get((model, agent_id)) or self._begin(model, agent_id, "", 0.0, is_wanted)
        load.n_placing += 1
        try:
            await load.result()
        except asyncio.CancelledError:
            if not load.is_wanted() and load.task is not None:
                self._forget(load)  # the next request begins another one
                load.task.cancel()
                await asyncio.gather(load.task, return_exceptions=True)
            raise
        finally:
            load.n_placing -= 1

    def lose_agent(self, agent_id: str, reason: str) -> None:
        """The agent is gone or silent, or has started anew: its loads end, which is no failure of it."""
        for load in self.under_way:
            if load.agent_id == agent_id:
                self._end(load, reason)

    def end_unwanted(self) -> None:
        """End the loads for placements that have ended. The agents may go on with them, but no more models leave."""
        for load in self.under_way:
            if not load.is_wanted():
                self._end(load, "it is not placed any more")

    def _end(self, load: ColdLoad, reason: str) -> None:
        load.ended = reason
        self._forget(load)
        if load.task is not None:
            load.task.cancel()

    def _begin(
        self, model: str, agent_id: str, evict: str | None, predicted_s: float, is_wanted: Callable[[], bool]
    ) -> ColdLoad:
        load = self._loads[model, agent_id] = ColdLoad(model, agent_id, self._clock(), predicted_s, is_wanted)
        self.started += 1
        load.task = asyncio.get_running_loop().create_task(self._run(load, evict))
        return load

    def _reached(self, load: ColdLoad | None, tenant: str) -> str:
        """The bound that lets no more requests of a tenant wait for a load, or for a new one; "": none does."""
        held = [("models that are loading", "all models", self.max_waiting, self.n_waiting, self._of_tenant[tenant])]
        if load is not None:
            most = max(1, self.max_waiting // 2)
            held.append((f"model {load.model!r}", "one model", most, load.n_waiting, load.of_tenant[tenant]))
        for what, of, most, count, own in held:
            if count >= most:
                return f"{count} requests wait for {what}, and at most {most} may (for {of}"
            share = self.share_of(tenant, most) if tenant else most
            if own >= share:
                return f"{own} of your requests wait for {what}, and at most {share} may (for {of}, of one tenant"
        return ""

    def _count(self, load: ColdLoad, tenant: str, change: int) -> None:
        load.n_waiting += change
        self.n_waiting += change
        for counts in (load.of_tenant, self._of_tenant):
            counts[tenant] += change
            if not counts[tenant]:
                del counts[tenant]

    async def close(self) -> None:
        """Cancel all loads."""
        tasks = [load.task for load in self._loads.values() if load.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, load: ColdLoad, evict: str | None) -> None:
        try:
            await self._load(load.agent_id, load.model, evict)
        except asyncio.CancelledError:
            raise  # which is no failure of the agent
        except Exception as error:
            self.failed += 1
            now = self._clock()
            self._failed = {key: until for key, until in self._failed.items() if until > now}
            if load.is_wanted() and not isinstance(error, NotRefused):  # else it was given up here
                self._failed[load.model, load.agent_id] = now + FAILED_S
            if isinstance(error, StarlingError) and not load.n_waiting and not load.n_placing:
                return  # neither a request nor a placement is there to report it to
            raise
        else:
            self.done += 1
        finally:
            self._forget(load)

    def _forget(self, load: ColdLoad) -> None:
        if self._loads.get((load.model, load.agent_id)) is load:
            del self._loads[load.model, load.agent_id]


def _always() -> bool:
    return True
