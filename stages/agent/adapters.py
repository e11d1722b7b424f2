"""The published LoRA adapters of this host's models: how they get here, and which of them are loaded.

    request -> file (verified, cached) -> model, loaded unless it is -> adapter, loaded into the model's engine

One load of each adapter runs at a time, however many requests ask for it.  An adapter stays until its model leaves, or
until it is unloaded: an orchestrator does that with the one that was used longest ago when another one needs its place.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path

from yarl import URL

from pipeline.api.adapter_names import adapter_of, base_of
from pipeline.blobs.interface import BlobStore
from pipeline.catalog import adapters as published
from pipeline.catalog import pulled_adapters
from pipeline.catalog.adapter_entry import AdapterEntry, check_adapter_names, checked
from pipeline.config.rules import MAX_ADAPTERS
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import Conflict, InvalidRequest, ModelNotFound, NotOnThisHost, ResourceError, StarlingError
from pipeline.fleet.bodies import LoadModelRequest
from stages.agent.disk_threads import MODELS
from stages.agent.downloads.adapter import AdapterSource, bring_adapter
from stages.agent.downloads.model import Context
from stages.agent.downloads.signed_store import SignedModels
from stages.agent.engines.interface import AdapterFile, no_adapters
from stages.agent.load_terms import REQUESTED, LoadTerms
from stages.agent.placement import Placement

log = logging.getLogger("starling.agent")

PARAM = "adapters"  # of a refusal that ends when another adapter of the model leaves

SETTLE_S = 2.0  # after its load an adapter stays for so long, unless it is unloaded without `only_idle`

Place = Callable[[LoadModelRequest, AdapterFile, LoadTerms], Awaitable[Placement]]


class AdapterLoad:
    """An adapter that is loaded, or loading. `task` raises the `StarlingError` for which it failed."""

    def __init__(self, entry: AdapterEntry, terms: LoadTerms) -> None:
        self.entry = entry
        self.terms = terms
        self.file: AdapterFile | None = None
        self.placement: Placement | None = None  # of its model
        self.ready_at = -math.inf  # s of the clock
        self.task: asyncio.Task[None]

    @property
    def is_ready(self) -> bool:
        """Whether requests may name it."""
        placement = self.placement
        is_serving = placement is not None and placement.serving.get(self.entry.adapter) == self.entry.digest
        return is_serving and placement is not None and placement.state == "READY"

    @property
    def has_ended(self) -> bool:
        """Whether it must be loaded anew: its model has left."""
        return self.placement is not None and self.placement.state in ("FAILED", "UNLOADED")


class Adapters:
    """One per agent. Used in one event loop."""

    def __init__(
        self,
        config: Config,
        context: Context,
        stores: list[BlobStore],
        signed: SignedModels | None,
        place: Place,
        settings: Callable[[str], ModelConfig],
        engine_of: Callable[[str], str],
        pinned: Callable[[], Collection[str]],
        *,
        reads_blobs: bool = True,
        make_memory: Callable[[str, int, LoadTerms], Awaitable[object]] | None = None,
    ) -> None:
        """place: loads a model with an adapter, or returns its placement.  settings: of a model.

        stores: that this agent reads by itself.  signed: reads by URLs of orchestrators; None: it takes none.
        engine_of: the other engine that computes a model; "": none does.  pinned: digests of models in use.
        reads_blobs: whether `stores` has `fleet.blobs`, whose answer that there is no such adapter is the last word.
        make_memory: of MODEL:ADAPTER and its bytes, before a running engine gets it; raises `ResourceError`.
        """
        self._config = config
        self._context = context
        self._stores = stores
        self._signed = signed
        self._place = place
        self._settings = settings
        self._engine_of = engine_of
        self._pinned = pinned
        self._reads_blobs = reads_blobs
        self._make_memory = make_memory
        self._loads: dict[str, AdapterLoad] = {}  # by MODEL:ADAPTER
        self._unloads: dict[str, asyncio.Task[None]] = {}  # likewise
        self._dropping = asyncio.Lock()  # held from the question whether a file is used to its removal
        self.on_changed: Callable[[], Awaitable[object]] = _nothing  # what `names` has: returns when it is stored

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are loaded or loading."""
        return tuple(name for name, one in self._loads.items() if not one.has_ended)

    @property
    def digests(self) -> set[str]:
        """Of their files."""
        return {one.entry.digest for one in self._loads.values() if not one.has_ended}

    async def load(self, request: LoadModelRequest, terms: LoadTerms = REQUESTED) -> AdapterLoad:
        """The load of an adapter, begun unless it is loaded. Raises `StarlingError` with the reason of a refusal."""
        name, base = request.model_id, base_of(request.model_id)
        if reason := check_adapter_names(name):
            raise InvalidRequest(f"model_id = {name[:200]!r}: {reason}", "model_id")
        if engine := self._engine_of(base):
            raise no_adapters(engine)
        if known := await self._settled(request, terms):
            return known
        entry = await self._entry_of(request)
        for asked, found, of in (
            (request.digest, entry.base_digest, "for a model with"),
            (request.adapter_digest, entry.digest, "with"),
        ):
            if asked and asked != found:
                raise Conflict(
                    f"{name!r} is published {of} the digest {found[:16]}..., asked for {asked[:16]}...: ask for the "
                    f"published one",
                    "digest",
                )
        if known := await self._settled(request, terms):  # since the question
            return known
        terms.check(name)
        self._check_bounds(entry)
        load = self._loads[name] = AdapterLoad(entry, terms)
        load.task = asyncio.get_running_loop().create_task(self._run(load, request))
        load.task.add_done_callback(partial(self._ended, load))
        return load

    async def unload(self, name: str, drop_cached: bool, only_idle: bool = False) -> None:
        """Let no more requests name an adapter. Idempotent. Raises `StarlingError`.

        A caller that is cancelled leaves nothing half-done: the work goes on.  With `only_idle` it raises `Conflict`
        while the adapter has requests or is loading, and for `SETTLE_S` afterwards: two that take turns at one place
        serve those who wait for them.
        """
        if reason := check_adapter_names(name):
            raise InvalidRequest(f"model_id = {name[:200]!r}: {reason}", "model_id")
        load = self._loads.get(name)
        while load is not None and only_idle:
            self._check_settled(load)
            if load.placement is not None:
                await load.placement.check_adapter_idle(load.entry.adapter)
            if (now := self._loads.get(name)) is load:
                break
            load = now  # unloaded and perhaps loaded again since the question
        digest = load.entry.digest if load is not None else ""
        if load is not None:
            task = self._unloads.get(name)
            if task is None:
                task = self._unloads[name] = asyncio.get_running_loop().create_task(self._unload(name, load))
                task.add_done_callback(partial(self._unloaded, name))
            await asyncio.shield(task)
        if not drop_cached:
            return
        if not digest and (entry := await MODELS.run(pulled_adapters.read, self._models_dir, name)) is not None:
            digest = entry.digest
        async with self._dropping:
            if digest in self.digests:
                raise Conflict(
                    f"the file of {name!r} is that of another loaded adapter; unload that first", "drop_cached"
                )
            if digest:
                await MODELS.uninterrupted(self._context.cache.remove_adapter, digest)

    async def _unload(self, name: str, load: AdapterLoad) -> None:
        load.task.cancel()
        await asyncio.wait([load.task])
        if load.placement is not None and not load.has_ended:
            await load.placement.remove_adapter(load.entry.adapter, self._timeout_s)
        if self._loads.get(name) is load:
            del self._loads[name]  # last: after an error the next call removes it
        await self.on_changed()

    def _unloaded(self, name: str, done: asyncio.Task[None]) -> None:
        self._unloads.pop(name, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("an adapter is not unloaded", extra={"model": name, "reason": str(error)})

    def _check_settled(self, load: AdapterLoad) -> None:
        """Raise `Conflict` while the adapter is loading, and shortly afterwards."""
        name = load.entry.name
        if not load.task.done():
            raise Conflict(f"{name!r} is loading: unload it later, or without only_idle", "only_idle")
        if (left_s := load.ready_at + SETTLE_S - self._context.clock()) > 0:
            raise Conflict(
                f"{name!r} was loaded just now: unload it in {left_s:.1f} s, or without only_idle", "only_idle"
            )

    async def forget_model(self, base: str) -> None:
        """A model leaves: so do its adapters."""
        for name, load in [(name, load) for name, load in self._loads.items() if base_of(name) == base]:
            load.task.cancel()
            await asyncio.wait([load.task])
            if self._loads.get(name) is load:
                del self._loads[name]

    async def stop(self) -> None:
        """End the loads that run. The names stay: the next agent loads them again."""
        for load in self._loads.values():
            load.task.cancel()
        for task in self._unloads.values():
            task.cancel()
        if tasks := [*(load.task for load in self._loads.values()), *self._unloads.values()]:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------ parts

    @property
    def _timeout_s(self) -> float:
        return float(self._config.fleet.agent.start_timeout_s)

    async def _settled(self, request: LoadModelRequest, terms: LoadTerms) -> AdapterLoad | None:
        """As `_known`, after the end of an unload: a load that is being unloaded must not begin again."""
        while unloading := self._unloads.get(request.model_id):
            await asyncio.wait([unloading])
        return self._known(request, terms)

    def _known(self, request: LoadModelRequest, terms: LoadTerms) -> AdapterLoad | None:
        """The load that runs already. Raises `Conflict` if it has another digest."""
        known = self._loads.get(request.model_id)
        if known is None or known.has_ended:
            return None
        if request.adapter_digest and known.entry.digest != request.adapter_digest:
            raise Conflict(
                f"{request.model_id!r} is loaded with the digest {known.entry.digest[:16]}..., asked for "
                f"{request.adapter_digest[:16]}...: unload it first",
                "adapter_digest",
            )
        if terms is REQUESTED or known.task.done():
            known.terms = terms  # a restoration does not change those of a request that waits
        if known.task.done() and not known.is_ready:
            # Its engine starts again, with the adapter or because of its file, which is looked at again.
            known.task = asyncio.get_running_loop().create_task(self._run(known, request))
            known.task.add_done_callback(partial(self._ended, known))
        return known

    async def _entry_of(self, request: LoadModelRequest) -> AdapterEntry:
        """The entry: of the request, of the first store that answers, or else of the file that is here."""
        name = request.model_id
        if request.adapter is not None and self._signed is not None:
            if request.adapter.entry.name != name:
                raise InvalidRequest(f"adapter.entry is of {request.adapter.entry.name[:200]!r}, expected {name!r}")
            return checked(request.adapter.entry, "the request to load it")
        failure: StarlingError | None = None
        for store in self._stores:
            try:
                return await published.find(store, name)
            except StarlingError as error:
                if isinstance(error, ModelNotFound) and self._reads_blobs:
                    raise ModelNotFound(error.message, "model_id") from None
                failure = failure or error
        entry = await MODELS.run(pulled_adapters.read, self._models_dir, name)
        if entry is not None:
            return entry
        raise failure or NotOnThisHost(
            f"{name!r} is not on this host, which uses no credentials (fleet.agent.signed_urls), and the request to "
            "load it has no signed URL: let orchestrators of this release, which can read the bucket, ask for it",
            "model_id",
        )

    def _check_bounds(self, entry: AdapterEntry) -> None:
        """Raise `StarlingError` unless the model can have this adapter besides those that it has."""
        settings = self._settings(entry.base)
        own = [one.name for one in settings.adapters]
        if entry.adapter in own:
            raise Conflict(
                f"{entry.name!r} is an adapter of this host's configuration (models.adapters), and another one is "
                f"published under its name: rename one of them",
                "model_id",
            )
        if entry.rank > settings.max_adapter_rank:
            raise NotOnThisHost(
                f"{entry.name!r} has rank {entry.rank}, and models.max_adapter_rank of this host allows "
                f"{settings.max_adapter_rank}: raise that",
                "model_id",
            )
        # As the engine counts them: the configured ones, too, and each name for itself.
        taken = sum(_size_of(Path(one.path)) for one in settings.adapters) + sum(
            one.entry.bytes
            for name, one in self._loads.items()
            if base_of(name) == entry.base and name != entry.name and not one.has_ended
        )
        most, count = settings.adapters_mb << 20, len(self._of(entry.base)) - (entry.name in self._of(entry.base))
        if entry.bytes > most:
            raise NotOnThisHost(
                f"{entry.name!r} has {entry.bytes:,} bytes, and models.adapters_mb of this host allows {most:,}: raise "
                "that",
                "model_id",
            )
        if len(own) + count >= MAX_ADAPTERS:
            raise ResourceError(
                f"{entry.base!r} has {len(own) + count} adapters here, and a model has at most {MAX_ADAPTERS}: unload "
                "one",
                PARAM,
            )
        if taken + entry.bytes > most:
            raise ResourceError(
                f"{entry.name!r} has {entry.bytes:,} bytes, the other adapters of its model {taken:,}, "
                f"and models.adapters_mb allows {most:,}: unload one, or raise that",
                PARAM,
            )

    def _of(self, base: str) -> list[str]:
        return [name for name in self.names if base_of(name) == base]

    async def _run(self, load: AdapterLoad, request: LoadModelRequest) -> None:
        entry = load.entry
        async with self._dropping:  # its file may be about to be removed, because this load was not known yet
            pass
        sources = self._sources(entry, request)
        path = await bring_adapter(self._context, entry, sources, lambda: {*self._pinned(), *self.digests})
        load.file = AdapterFile(adapter_of(entry.name), entry.digest, path, entry.bytes)
        of_model = LoadModelRequest(model_id=entry.base, digest=entry.base_digest, signed=request.signed)
        load.placement = await self._place(of_model, load.file, load.terms)
        if self._make_memory is not None and load.placement.adapters.get(load.file.name) != load.file:
            await self._make_memory(entry.name, entry.bytes, load.terms)
        try:
            await load.placement.add_adapter(load.file, self._timeout_s)
        except ResourceError as error:
            if "adapters_mb" in error.message:  # the engine's own count
                raise ResourceError(error.message, PARAM) from None
            raise
        load.ready_at = self._context.clock()
        await self.on_changed()

    def _sources(self, entry: AdapterEntry, request: LoadModelRequest) -> list[AdapterSource]:
        def from_store(store: BlobStore) -> AdapterSource:
            return AdapterSource(store.address, lambda offset, nbytes: store.get(entry.key, offset, nbytes))

        sources = [from_store(store) for store in self._stores]
        if self._signed is not None and request.adapter is not None:
            read = partial(self._signed.read, URL(request.adapter.url, encoded=True))
            sources.append(AdapterSource("the URL that an orchestrator has signed", read))
        return sources

    @property
    def _models_dir(self) -> Path:
        return self._context.cache.models_dir

    def _ended(self, load: AdapterLoad, done: asyncio.Task[None]) -> None:
        if done.cancelled() or (error := done.exception()) is None:
            return
        if self._loads.get(load.entry.name) is load and load.task is done:
            del self._loads[load.entry.name]
        log.error("an adapter is not loaded", extra={"model": load.entry.name, "reason": str(error)})


async def _nothing() -> None:
    pass


def _size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a directory; 0 without one."""
    try:
        path = expand_user(path)
        files = path.iterdir() if path.is_dir() else (path,)
        return sum(one.stat().st_size for one in files)
    except OSError:
        return 0
