"""Places the models of the agent that ran here before, whatever refuses them at first.

A successor may be killed while it does so, as by the kernel for want of memory, and a blob store may not answer yet.
So a name stays in agent.json until its model is placed, refused for good, or unloaded; `Models` (models.py) reports
these.  What is refused for now is asked for again, after pauses that grow up to a bound.

A model that lacks memory or disk waits for processes of the last run and for other programs, and must not take what is
freed for another model.  So it is refused for good `ROOM_S` after the start, or as soon as a model is unloaded.
Standby engines are ended for it once, not at each attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from pipeline.api.adapter_names import base_of
from pipeline.blobs.retry import Sleep, delay_s
from pipeline.errors import ModelUnavailable, NotOnThisHost, ResourceError, StarlingError, StorageUnavailable
from stages.agent.adapters import PARAM as ADAPTERS
from stages.agent.adapters import AdapterLoad
from stages.agent.load_terms import LoadTerms

log = logging.getLogger("starling.agent")

MAX_MODELS = "fleet.agent.max_models"  # of a refusal: other models have all places

# From the start of the agent, in which models wait for memory or disk. Processes that were killed free theirs within
# seconds, also those with hundreds of gigabytes. What is freed later was usually freed for another model.
ROOM_S = 120.0


class Restoration:
    """Of one agent. Used in one event loop."""

    def __init__(
        self,
        names: Collection[str],
        place: Callable[[str, LoadTerms], Awaitable[object]],
        load_adapter: Callable[[str, LoadTerms], Awaitable[AdapterLoad]],
        changed: Callable[[], object],
        sleep: Sleep = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """names: of models and adapters.  place, load_adapter: raise `StarlingError`.  changed: `names` has changed."""
        self._names = dict.fromkeys(names)  # in their order
        self._place = place
        self._load_adapter = load_adapter
        self._changed = changed
        self._sleep = sleep
        self._jitter = jitter
        self._clock = clock
        self._short: dict[str, str] = {}  # names that lacked memory or disk, and the message
        self._took_standby: set[str] = set()  # names for which standby engines were ended: they are not again
        self._room_until = 0.0  # s of the clock; set by `run`

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are still to be restored."""
        return tuple(self._names)

    def placed(self, name: str) -> None:
        """A model is placed, for whatever reason. Whether it is stored is no longer decided here."""
        self._names.pop(name, None)

    def unloaded(self, name: str) -> None:
        """A model is not wanted any more, nor are its adapters; or an adapter is not."""
        found = [one for one in self._names if name in (one, base_of(one))]
        for one in found:
            del self._names[one]
        if found:
            self._changed()

    def room_was_made(self) -> None:
        """A model was unloaded: what it leaves is not for those that have lacked it."""
        for name, message in self._short.items():
            if name in self._names:
                self._refuse(name, message)

    async def run(self) -> None:
        """Ask for all of them, in their order, and again for those that are refused for now."""
        self._room_until = self._clock() + ROOM_S
        turn = asyncio.Lock()  # those who wait for it get it in the order in which they came
        await asyncio.gather(*(self._restore(name, turn) for name in self.names))

    async def _restore(self, name: str, turn: asyncio.Lock) -> None:
        for refusals in itertools.count(1):
            try:
                async with turn:
                    load = await self._begin(name)
                if load is not None:
                    await _finished(load)
                self.placed(name)
                return
            except StarlingError as error:
                if name not in self._names:
                    self._changed()  # an adapter was stored until its load had ended
                    return
                left_s = math.inf
                if isinstance(error, ResourceError):
                    self._short[name] = error.message
                    left_s = self._room_until - self._clock()
                if left_s <= 0 or not is_for_now(error):
                    self._refuse(name, error.message)
                    return
                if refusals == 1:
                    extra = {"model": name, "reason": error.message}
                    log.warning("a model of the last run is not loaded yet", extra=extra)
                await self._sleep(min(left_s, delay_s(refusals, error.retry_after_s, self._jitter())))

    async def _begin(self, name: str) -> AdapterLoad | None:
        """Place a model, or begin the load of an adapter. Raises `StarlingError`."""

        def is_wanted() -> bool:
            return name in self._names

        if is_wanted():
            terms = LoadTerms(is_wanted, name not in self._took_standby, partial(self._took_standby.add, name))
            if ":" in name:
                return await self._load_adapter(name, terms)
            await self._place(name, terms)
        return None

    def _refuse(self, name: str, reason: str) -> None:
        """For good: no successor asks for it."""
        log.error("a model of the last run is not loaded", extra={"model": name, "reason": reason})
        del self._names[name]
        self._changed()


async def _finished(load: AdapterLoad) -> None:
    """Wait for its end. Raises the `StarlingError` for which it failed."""
    task = load.task
    await asyncio.wait([task])
    if not task.cancelled():  # unloaded meanwhile, or the agent ends
        task.result()


def is_for_now(error: StarlingError) -> bool:
    """Whether a model that is refused may be placed later, though no operator changes anything.

    If others have its place, they do not leave for it.
    """
    if isinstance(error, ResourceError):
        return error.param not in (MAX_MODELS, ADAPTERS)
    return isinstance(error, (StorageUnavailable, ModelUnavailable)) and not isinstance(error, NotOnThisHost)
