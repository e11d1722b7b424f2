"""Signs URLs of blobs for agents without credentials, each for the models that it was told to load.

    begin, end      around a request to load a model, which carries its entry and the first URLs
    observe         a heartbeat names the blobs whose URLs the agent needs next; they are signed beside the polls
    take            what the next heartbeat to the agent carries

An orchestrator signs only for loads that it has asked for itself, and for those that its own requests wait for: their
engine may have been ready before its weights, when another orchestrator that has ended asked for it.  Otherwise it asks
for the load again: for the next request for the model, or as the leader for a model that is placed.  Without sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from pipeline.blobs.interface import BlobStore
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.catalog.entry import Entry
from pipeline.errors import StarlingError, StorageUnavailable
from pipeline.fleet.bodies import MAX_URL_CHARACTERS, MAX_URLS, HeartbeatResponse, SignedAdapter, SignedUrls

log = logging.getLogger("starling.orchestrator")

SIGN_S = 5.0  # for the credentials, which may have to be fetched
FIRST = 32  # URLs with a request to load a model: the index, and the first parts
MAX_LOADS = 64  # of one agent that are remembered
MOST_CHARACTERS = 128 << 10  # URLs of one model in one body. A body of two of them is below the least max_body_mb
PROMPT_S = 0.25  # between two polls of an agent out of turn, because it waits for URLs


class _Load:
    """A load that this orchestrator has asked for. `incarnation`: of the agent."""

    def __init__(self, entry: Entry, incarnation: str) -> None:
        self.entry = entry
        self.incarnation = incarnation
        self.calls = 0  # under way


class UrlSigner:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self, store: BlobStore, valid_s: int, poll_now: Callable[[str], object], clock: Callable[[], float]
    ) -> None:
        """`valid_s`: of a URL. `poll_now(agent_id)`: URLs are ready for an agent that waits for them."""
        self._store = store
        self._valid_s = valid_s
        self._poll_now = poll_now
        self._clock = clock
        self._entries: Mapping[str, Entry] = {}
        self._adapters: Mapping[str, AdapterEntry] = {}  # by MODEL:ADAPTER
        self._takers: dict[str, str] = {}  # agents without credentials, and their incarnations
        self._loads: dict[str, OrderedDict[str, _Load]] = {}  # by agent and model
        self._ready: dict[str, dict[str, SignedUrls]] = {}  # likewise: for the next heartbeat
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by agent: it is signed for
        self._prompted: dict[str, float] = {}  # by agent: the last poll out of turn

    def set_entries(self, entries: Iterable[Entry], adapters: Iterable[AdapterEntry] = ()) -> None:
        """What the catalog contains now."""
        self._entries = {entry.name: entry for entry in entries}
        self._adapters = {entry.name: entry for entry in adapters}

    # ---------------------------------------------------------------- loads

    async def begin(self, agent_id: str, model: str) -> SignedUrls | None:
        """What the request to load the model carries; None if the agent needs no URLs. `end` must follow.

        Without URLs in it, because they could not be signed, the agent waits for those of later heartbeats.
        """
        load = self._remember(agent_id, model)
        if load is None:
            return None
        load.calls += 1
        entry = load.entry
        parts = range(min(entry.n_parts, FIRST - 1))
        try:
            return await self._signed(entry, [entry.index_key, *(entry.part_key(part) for part in parts)])
        except StarlingError as error:
            log.warning("URLs of blobs cannot be signed", extra={"model": model, "reason": error.message})
            return SignedUrls(entry=entry, valid_s=self._valid_s)
        except BaseException:
            self.end(agent_id, model)
            raise

    async def adapter(self, agent_id: str, name: str) -> SignedAdapter | None:
        """What the request to load MODEL:ADAPTER carries as well; None if the agent reads it by itself.

        The agent reads the file at once, so that one URL is enough.  Raises `StorageUnavailable`.
        """
        entry = self._adapters.get(name)
        if entry is None or not self._store.can_sign or agent_id not in self._takers:
            return None
        return SignedAdapter(entry=entry, url=(await self._urls([entry.key]))[entry.key])

    def _remember(self, agent_id: str, model: str) -> _Load | None:
        """Sign for a load from now on; None if the agent needs no URLs."""
        entry = self._entries.get(model)
        if entry is None or not self._store.can_sign or agent_id not in self._takers:
            return None
        loads = self._loads.setdefault(agent_id, OrderedDict())
        load = loads.get(model)
        if load is None or not load.entry.same_model(entry):
            loads[model] = load = _Load(entry, self._takers[agent_id])
        loads.move_to_end(model)
        while len(loads) > MAX_LOADS:
            loads.popitem(last=False)
        return load

    def end(self, agent_id: str, model: str) -> None:
        """The request has been answered. URLs are signed for it until a heartbeat says that the model is not there."""
        load = self._load(agent_id, model)
        if load is not None:
            load.calls = max(0, load.calls - 1)
            if agent_id not in self._takers:
                self._drop_ended(agent_id)

    def forget(self, agent_id: str) -> None:
        """An agent has left. Requests to load models may still wait: it may register again, and have gone on."""
        self._takers.pop(agent_id, None)
        self._drop_ended(agent_id)
        self._ready.pop(agent_id, None)
        self._prompted.pop(agent_id, None)

    def _drop_ended(self, agent_id: str) -> None:
        """Sign no longer for the loads of an agent whose requests have been answered."""
        loads = self._loads.pop(agent_id, OrderedDict[str, _Load]())
        if kept := OrderedDict((model, load) for model, load in loads.items() if load.calls):
            self._loads[agent_id] = kept

    def has_told(self, agent_id: str, model: str) -> bool:
        """Whether URLs are signed for that load now."""
        return self._load(agent_id, model) is not None

    def _load(self, agent_id: str, model: str) -> _Load | None:
        loads = self._loads.get(agent_id)
        return loads.get(model) if loads else None

    # ---------------------------------------------------------------- heartbeats

    def take(self, agent_id: str) -> tuple[SignedUrls, ...]:
        """The URLs that the next heartbeat to the agent carries: of two models, the others follow."""
        if agent_id not in self._takers:  # it was rolled back meanwhile, and would refuse the field
            self._ready.pop(agent_id, None)
            return ()
        ready = self._ready.get(agent_id, {})
        taken = tuple(ready.pop(model) for model in list(ready)[:2])
        if not ready:
            self._ready.pop(agent_id, None)
        return taken

    def observe(self, details: HeartbeatResponse, has_requests: Callable[[str], bool] = lambda model: False) -> None:
        """An agent has answered a poll. `has_requests(model)`: of this orchestrator, at its engine."""
        agent_id = details.agent_id
        if details.takes_signed_urls:
            self._takers[agent_id] = details.incarnation
        else:
            self._takers.pop(agent_id, None)
        before = self._loads.get(agent_id, OrderedDict[str, _Load]())
        for model in [name for name, load in before.items() if load.incarnation != details.incarnation]:
            del before[model]
        # An engine may be ready while its weights still arrive.
        held = {one.model_id for one in details.loaded_models if one.model_state not in ("FAILED", "UNLOADED")}
        for one in details.wanted_urls[:MAX_LOADS]:
            if one.model_id in held and not self.has_told(agent_id, one.model_id) and has_requests(one.model_id):
                self._remember(agent_id, one.model_id)
        loads = self._loads.get(agent_id)
        if not loads:
            self._loads.pop(agent_id, None)
            return
        for model in [name for name, load in loads.items() if not load.calls and name not in held]:
            del loads[model]
        if agent_id not in self._tasks and any(one.model_id in loads for one in details.wanted_urls[:MAX_LOADS]):
            task = asyncio.get_running_loop().create_task(self._sign(details))
            self._tasks[agent_id] = task
            task.add_done_callback(lambda done: self._tasks.pop(agent_id, None))

    async def close(self) -> None:
        """Cancel what runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sign(self, details: HeartbeatResponse) -> None:
        """Sign what an agent wants, of the loads that it was told."""
        agent_id = details.agent_id
        for wanted in details.wanted_urls[:MAX_LOADS]:
            load = self._load(agent_id, wanted.model_id)
            keys = [key for key in wanted.keys[:MAX_URLS] if load is not None and load.entry.has(key)]
            if load is None or not keys:
                continue
            try:
                signed = await self._signed(load.entry, keys)
            except StarlingError as error:
                log.warning(
                    "URLs of blobs cannot be signed",
                    extra={"model": wanted.model_id, "agent": agent_id, "reason": error.message},
                )
                return
            if agent_id in self._takers and self._load(agent_id, wanted.model_id) is load:  # not ended meanwhile
                self._ready.setdefault(agent_id, {})[wanted.model_id] = signed
        now = self._clock()
        if agent_id in self._ready and now >= self._prompted.get(agent_id, -PROMPT_S) + PROMPT_S:
            self._prompted[agent_id] = now
            self._poll_now(agent_id)

    async def _signed(self, entry: Entry, keys: list[str]) -> SignedUrls:
        """Raises `StarlingError`."""
        urls = await self._urls(keys)
        longest = max(len(key) + len(url) for key, url in urls.items())
        sent = list(urls.items())[: MOST_CHARACTERS // longest]
        return SignedUrls(entry=entry, valid_s=self._valid_s, urls=dict(sent))

    async def _urls(self, keys: list[str]) -> dict[str, str]:
        """By key. Raises `StarlingError`."""
        try:
            async with asyncio.timeout(SIGN_S):
                urls = await self._store.sign(keys, self._valid_s)
        except TimeoutError:
            raise StorageUnavailable(f"{self._store.address}: no credentials within {SIGN_S:g} s") from None
        except StarlingError:
            raise
        except Exception as error:  # of the store's library. Its text may have an URL, or a part of the credentials
            raise StorageUnavailable(f"{self._store.address}: {type(error).__name__} of the store's library") from None
        longest = max(len(key) + len(url) for key, url in urls.items())
        if longest > MAX_URL_CHARACTERS:
            raise StorageUnavailable(f"{self._store.address}: a signed URL has over {MAX_URL_CHARACTERS:,} characters")
        return urls
