"""Places the models of the agent that ran here before, whatever refuses them at first.

A successor may be killed while it does so, as by the kernel for want of memory, and a blob store may not answer yet.
So a name stays in agent.json until its model is placed, refused for good, or unloaded; `Models` (models.py) reports
these.  What is refused for now is asked for again, after pauses that grow up to a bound.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Collection

from pipeline.api.adapter_names import base_of
from pipeline.blobs.retry import Sleep, delay_s
from pipeline.errors import ModelUnavailable, ResourceError, StarlingError, StorageUnavailable
from stages.agent.adapters import PARAM as ADAPTERS
from stages.agent.adapters import AdapterLoad

log = logging.getLogger("starling.agent")

MAX_MODELS = "fleet.agent.max_models"  # of a refusal: other models have all places

IsWanted = Callable[[], bool]  # false if the model was unloaded since it was asked for


class Restoration:
    """Of one agent. Used in one event loop."""

    def __init__(
        self,
        names: Collection[str],
        place: Callable[[str, IsWanted], Awaitable[object]],
        load_adapter: Callable[[str, IsWanted], Awaitable[AdapterLoad]],
        changed: Callable[[], object],
        sleep: Sleep = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """names: of models and adapters.  place, load_adapter: raise `StarlingError`.  changed: `names` has changed."""
        self._names = dict.fromkeys(names)  # in their order
        self._place = place
        self._load_adapter = load_adapter
        self._changed = changed
        self._sleep = sleep
        self._jitter = jitter

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

    async def run(self) -> None:
        """Ask for all of them, in their order, and again for those that are refused for now."""
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
                    return
                extra = {"model": name, "reason": error.message}
                if not is_for_now(error):
                    log.error("a model of the last run is not loaded", extra=extra)
                    self._names.pop(name)
                    self._changed()
                    return
                if refusals == 1:
                    log.warning("a model of the last run is not loaded yet", extra=extra)
                await self._sleep(delay_s(refusals, error.retry_after_s, self._jitter()))

    async def _begin(self, name: str) -> AdapterLoad | None:
        """Place a model, or begin the load of an adapter. Raises `StarlingError`."""

        def is_wanted() -> bool:
            return name in self._names

        if is_wanted():
            if ":" in name:
                return await self._load_adapter(name, is_wanted)
            await self._place(name, is_wanted)
        return None


async def _finished(load: AdapterLoad) -> None:
    """Wait for its end. Raises the `StarlingError` for which it failed."""
    task = load.task
    await asyncio.wait([task])
    if not task.cancelled():  # unloaded meanwhile, or the agent ends
        task.result()


def check_wanted(name: str, is_wanted: IsWanted) -> None:
    """Raise `ModelUnavailable` if a model was unloaded since it was asked for."""
    if not is_wanted():
        raise ModelUnavailable(f"{name!r} was unloaded meanwhile", "model_id")


def is_for_now(error: StarlingError) -> bool:
    """Whether a model that is refused may be placed later, though no operator changes anything.

    If others have its place, they do not leave for it.
    """
    if isinstance(error, ResourceError):
        return error.param not in (MAX_MODELS, ADAPTERS)
    return isinstance(error, (StorageUnavailable, ModelUnavailable))
