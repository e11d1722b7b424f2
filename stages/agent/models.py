"""The models of this host: which are placed, how they get here, and what remains after a restart of the agent.

    AGENT_DIR/agent.json    id, incarnation and placed models (state_file.py)
    AGENT_DIR/engines/...   a home for each model's engines

A model that was placed when the agent was killed is loaded again by its successor (restoration.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.api.adapter_names import base_of
from pipeline.blobs.address import needs_credentials
from pipeline.blobs.interface import BlobStore
from pipeline.catalog import contents, pulled
from pipeline.config.rules import check_name
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import (
    Conflict,
    DiskFailed,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    NotOnThisHost,
    ResourceError,
    StarlingError,
)
from pipeline.fleet.bodies import LoadModelRequest, SignedUrls, WantedUrls
from stages.agent.adapters import Adapters
from stages.agent.cache.eviction import Bounds
from stages.agent.cache.model_cache import ModelCache
from stages.agent.disk_threads import ENGINES, MODELS
from stages.agent.downloads.arriving import Showcase, remove_showcase
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.model import Arrival, Context, Exchange, download_model
from stages.agent.downloads.queue import DownloadQueue
from stages.agent.downloads.signed_store import SignedModels, entry_of
from stages.agent.downloads.transfer import Limits
from stages.agent.engines import local_model
from stages.agent.engines.external_engine import ExternalEngine, Listen
from stages.agent.engines.http_session import HttpSession
from stages.agent.engines.interface import AdapterFile, Engine
from stages.agent.engines.local_model import LocalModel
from stages.agent.engines.starling_engine import StarlingEngine, make_kernel_build, make_standby
from stages.agent.load_terms import REQUESTED, LoadTerms
from stages.agent.memory_check import MEGABYTE, check_adapter_memory, check_memory
from stages.agent.placement import Placement, Source
from stages.agent.restoration import MAX_MODELS, Restoration
from stages.agent.state_file import StateFile, Stored

log = logging.getLogger("starling.agent")

DOWNLOADS_AT_ONCE = 2
MAX_FAILED = 16  # models whose failure is remembered


class Models:
    """The placed models. Used in one event loop."""

    def __init__(
        self,
        config: Config,
        agent_dir: Path,
        models_dir: Path,
        stored: Stored,
        stores: list[BlobStore],
        session: HttpSession,
        free_port: Callable[[str], int],
        is_open: Callable[[], bool],
        exchange: Exchange | None = None,
        listen: Listen | None = None,
        signed: SignedModels | None = None,
    ) -> None:
        """`stored`: of this agent, with the models of the one before. `is_open`: whether engines may take requests now.

        exchange: with other agents.  free_port: of a host.
        listen: opens the doors of other engines; None: there are none.
        stores: that this agent reads by itself.  signed: by URLs of orchestrators; None: it takes none.
        """
        self._config = config
        self._agent_dir = agent_dir
        self._file = StateFile(agent_dir, stored, self._names)
        self._stores = stores
        self._signed = signed
        self._reads_blobs = signed is None or not needs_credentials(config.fleet.blobs)  # so `stores` has fleet.blobs
        self._session = session
        self._free_port = free_port
        self._is_open = is_open
        self._listen = listen
        fleet = config.fleet
        self.other_engines = {one.model: one for one in fleet.agent.engines}
        self.cache = ModelCache(models_dir, Bounds(fleet.cache_mb * MEGABYTE, fleet.free_mb * MEGABYTE))
        self._context = Context(
            self.cache,
            Bandwidth(fleet.download_mb_per_s * MEGABYTE, time.monotonic),
            Limits(fleet.download_connections),
            exchange=exchange,
        )
        self._downloads: DownloadQueue[Arrival] = DownloadQueue(DOWNLOADS_AT_ONCE)
        self.adapters = Adapters(
            config,
            self._context,
            stores,
            signed,
            lambda request, adapter, terms: self._place(request, (adapter,), terms),
            self.settings,
            lambda name: self.other_engines[name].engine if name in self.other_engines else "",
            lambda: self.pinned,
            reads_blobs=self._reads_blobs,
            make_memory=self._make_adapter_memory,
        )
        self.adapters.on_changed = self._file.store
        self._placed: OrderedDict[str, Placement] = OrderedDict()
        self._restoration = Restoration(
            stored.models,
            lambda name, terms: self._place(LoadModelRequest(model_id=name), terms=terms),
            lambda name, terms: self.adapters.load(LoadModelRequest(model_id=name), terms),
            self._file.changed,
        )
        self._changing = asyncio.Lock()
        self._unloading: set[asyncio.Task[None]] = set()
        self.standby = make_standby(fleet.agent.standby_engines, agent_dir)
        kv_types = {ModelConfig(name="any").kv_type, *(model.kv_type for model in config.models)}
        self.kernels = make_kernel_build(kv_types, agent_dir, self._is_loading)
        # Of engines of all models: a model that is placed again must not look like its engine of before.
        self._next_incarnation = itertools.count(1).__next__
        self.download_rate = 0.0  # bytes/s of the last download
        self.disk_error = ""  # why the last download could not be written; "": it could, or there was no room

    async def make_ready(self) -> None:
        """What engines need before a model is known: kernels, then processes that wait for one."""
        if self._config.fleet.agent.compile_kernels:
            await self.kernels.run()
        self.standby.keep()

    def _is_loading(self) -> bool:
        """Whether an engine is starting."""
        return any(one.engine is not None and one.state in ("DOWNLOADING", "LOADING_TO_GPU") for one in self.placed)

    @property
    def placed(self) -> list[Placement]:
        """Models with an engine, without one yet, and those that failed last."""
        return list(self._placed.values())

    async def restore(self) -> None:
        """Place the models of the agent that ran here before."""
        await self._restoration.run()

    async def place(self, request: LoadModelRequest) -> Placement:
        """The placement of a model, begun unless it is placed, and stored.

        Raises `StarlingError` with the reason of a refusal.
        """
        placement = await self._place(request)
        await self._file.finish()
        return placement

    async def _place(
        self,
        request: LoadModelRequest,
        adapters: tuple[AdapterFile, ...] = (),
        terms: LoadTerms = REQUESTED,
    ) -> Placement:
        """The same, not stored yet; engines of a new placement start with these adapters.

        A caller that is cancelled has not placed it: the adapter for which it was placed would stay without it.
        """
        name = request.model_id
        if reason := check_name(name):
            raise InvalidRequest(f"model_id = {name!r}: {reason}", "model_id")
        if known := self._known(request):
            return known
        signed = request.signed if self._signed is not None and name not in self.other_engines else None
        entry = entry_of(signed, name) if signed is not None else await self._find(name)
        if request.digest and isinstance(entry, LocalModel) and entry.digest != request.digest:
            raise Conflict(
                f"{name!r} is a model of {entry.engine.engine} on this host (fleet.agent.engines), and another one is "
                f"published under its name: rename one of them",
                "digest",
            )
        if request.digest and entry.digest != request.digest:
            raise Conflict(
                f"{name!r} is published with the digest {entry.digest[:16]}..., asked for {request.digest[:16]}...: "
                f"ask for the published one",
                "digest",
            )
        async with self._changing:
            if known := self._known(request):  # since the question
                return known
            terms.check(name)
            running = [one for one in self.placed if one.state != "FAILED"]
            if len(running) >= self._config.fleet.agent.max_models:
                raise ResourceError(
                    f"{len(running)} models are loaded, and fleet.agent.max_models allows no more: unload one of "
                    f"{', '.join(sorted(one.model_id for one in running))}",
                    MAX_MODELS,
                )
            await self.make_memory(entry, adapters, terms)
            if signed is not None and self._signed is not None:
                self._signed.begin(signed)
            placement = Placement(
                entry,
                self._bring,
                self._engine,
                self._is_open,
                next_incarnation=self._next_incarnation,
                release=partial(remove_showcase, self._home_of(name)),
                adapters=adapters,
            )
            self._placed[name] = placement
            self._placed.move_to_end(name)
            self._restoration.placed(name)
            self._forget_failed()
            self._file.changed()
            return placement

    def _known(self, request: LoadModelRequest) -> Placement | None:
        """The placement that runs already. Raises `Conflict` if it has another digest."""
        known = self._placed.get(request.model_id)
        if known is None or known.state in ("FAILED", "UNLOADED"):
            return None
        if request.digest and known.entry.digest != request.digest:
            raise Conflict(
                f"{request.model_id!r} is loaded with the digest {known.entry.digest[:16]}..., asked for "
                f"{request.digest[:16]}...: unload it first",
                "digest",
            )
        self.take_urls((request.signed,) if request.signed is not None else ())
        return known

    async def unload(self, name: str, drop_cached: bool, only_idle: bool = False) -> None:
        """End a model's engine. Idempotent.

        Raises `Conflict` if its files are in use by another model, with `only_idle` also while it has requests.
        Those of an adapter finish.
        """
        if ":" in name:
            try:
                await self.adapters.unload(name, drop_cached, only_idle)
            finally:
                if name not in self.adapters.names:
                    self._restoration.unloaded(name)
            await self._file.finish()
            return
        # Not in the caller's task: a caller that is gone must leave no model half-ended.
        work = asyncio.get_running_loop().create_task(self._unload(name, drop_cached, only_idle))
        self._unloading.add(work)
        work.add_done_callback(self._unloaded)
        await asyncio.shield(work)

    def _unloaded(self, done: asyncio.Task[None]) -> None:
        self._unloading.discard(done)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.info("a model is not unloaded", extra={"reason": str(error)})

    async def _unload(self, name: str, drop_cached: bool, only_idle: bool) -> None:
        async with self._changing:
            placement = self._placed.get(name)
            if placement is not None:
                if only_idle:
                    await placement.check_idle()
                await self.adapters.forget_model(name)
                await placement.stop()
                if self._signed is not None:
                    self._signed.end(name)
                del self._placed[name]
                self._file.changed()
                self._restoration.room_was_made()
            self._restoration.unloaded(name)
        # Before the answer: else a successor of a killed agent would load what its caller has been told is unloaded.
        # Not under the lock: other models do not wait for that disk.
        await self._file.finish()
        if not drop_cached or name in self.other_engines:  # whose files are not the agent's
            return
        async with self._changing:
            # Under the lock: a model that is placed between the question and the removal would lose its files.
            record = await MODELS.run(pulled.read, self.cache.models_dir, name)
            known = placement.entry.digest if placement is not None else ""
            digest = known or (record.entry.digest if record is not None else "")
            if digest in self.pinned:
                raise Conflict(f"the files of {name!r} are those of a loaded model; unload that first", "drop_cached")
            if digest:
                await MODELS.run(self.cache.remove, digest)

    async def stop(self) -> None:
        """End all engines. They stay stored: the next agent loads them again."""
        await self.adapters.stop()
        async with self._changing:
            try:
                await asyncio.gather(*(one.stop() for one in self.placed))
            finally:
                await self.kernels.stop()
                await self.standby.stop()
                await self._file.finish()

    async def open(self) -> None:
        """Let the engines take requests."""
        await asyncio.gather(*(one.open() for one in self.placed))

    async def close(self) -> None:
        """Let the engines take no more requests."""
        await asyncio.gather(*(one.close() for one in self.placed))

    def find(self, name: str) -> Placement:
        """A placed model, also by the name of an adapter. Raises `ModelNotFound`."""
        placement = self._placed.get(base_of(name))
        if placement is None:
            known = ", ".join(sorted(self._placed)) or "none"
            raise ModelNotFound(f"no model {name[:128]!r} is loaded on this agent; loaded models: {known}", "model")
        return placement

    @property
    def pinned(self) -> set[str]:
        """Digests of the files that engines use."""
        return {one.entry.digest for one in self.placed if one.state != "FAILED"}

    # ------------------------------------------------------------------ signed URLs

    @property
    def takes_signed_urls(self) -> bool:
        """Whether orchestrators are to sign URLs for this agent."""
        return self._signed is not None

    def take_urls(self, given: tuple[SignedUrls, ...]) -> None:
        """Use these URLs for models that are loading. Others are dropped."""
        if self._signed is not None:
            for one in given:
                self._signed.take(one)

    def wanted_urls(self) -> tuple[WantedUrls, ...]:
        """What the next heartbeats are to bring."""
        return self._signed.wanted() if self._signed is not None else ()

    # ------------------------------------------------------------------ how a model gets here

    async def _bring(self, placement: Placement) -> None:
        """Bring the files here. Raises `StarlingError`."""
        entry = placement.entry
        if isinstance(entry, LocalModel):
            return
        begun = time.monotonic()
        home = self._home_of(entry.name)
        await ENGINES.uninterrupted(remove_showcase, home)  # of an agent that was killed
        is_streamed = self._streams_layers(entry.name) and not placement.adapters
        showcase = Showcase(home, placement.note_arriving) if is_streamed else None
        stores = (self._signed.stores_of(entry) if self._signed is not None else []) or self._stores
        try:
            arrival = await self._downloads.wait_for(
                f"{entry.digest}/{entry.name}",
                lambda: download_model(
                    self._context,
                    entry,
                    stores,
                    placement.note_progress,
                    pinned=lambda: {*self.pinned, *self.adapters.digests},
                    showcase=showcase,
                ),
            )
        except StarlingError as error:
            if isinstance(error, DiskFailed):  # a bound that it keeps is no failure; the probe finds a full disk
                self.disk_error = error.message
            raise
        finally:
            if self._signed is not None:
                self._signed.end(entry.name)
        self.disk_error = ""
        if arrival.report is not None and arrival.report.received:
            self.download_rate = arrival.report.received / max(time.monotonic() - begun, 1e-3)

    def _streams_layers(self, name: str) -> bool:
        """Whether an engine may start with a file that is still downloaded."""
        # Without mmap weights are read at once; adapters are prepared beside the models of the host.
        is_mapped, has_adapters = self._config.performance.use_mmap, bool(self.settings(name).adapters)
        return self._config.fleet.agent.layer_streaming and is_mapped and not has_adapters

    async def _find(self, name: str) -> Source:
        """The entry, from the first store that answers; without one, of the files that are here."""
        if engine := self.other_engines.get(name):
            return await ENGINES.run(local_model.find, engine, self._home_of(name))
        failure: StarlingError | None = None
        for store in self._stores:
            try:
                return await contents.find(store, name)
            except StarlingError as error:
                if isinstance(error, ModelNotFound) and self._reads_blobs:
                    raise ModelNotFound(error.message, "model_id") from None
                failure = failure or error
        record = await MODELS.run(pulled.read, self.cache.models_dir, name)
        if record is not None and await MODELS.run(pulled.is_complete, self.cache.models_dir, record.entry):
            if failure is not None:
                log.warning("the blob store does not answer: a model is loaded from the cache", extra={"model": name})
            return record.entry
        if not self._reads_blobs:
            kind = NotOnThisHost if failure is None or isinstance(failure, ModelNotFound) else ModelUnavailable
            raise kind(
                f"{name!r} is not on this host, which uses no credentials (fleet.agent.signed_urls), and the "
                "request to load it has no signed URLs: let orchestrators of this release, which can read the bucket, "
                "ask for it" + (f" ({failure.message})" if failure is not None else ""),
                "model_id",
            )
        assert failure is not None
        raise failure

    async def make_memory(
        self, entry: Source, adapters: tuple[AdapterFile, ...] = (), terms: LoadTerms = REQUESTED
    ) -> None:
        """Raise `ResourceError` unless the machine has memory for the model, without standby engines if need be.

        `adapters`: with which it is started, besides those of its settings.
        """
        await self._with_memory(
            entry.name, partial(check_memory, self._config, entry, self.settings(entry.name), adapters), terms
        )

    async def _make_adapter_memory(self, name: str, nbytes: int, terms: LoadTerms) -> None:
        """Raise `ResourceError` unless the machine has memory for an adapter of an engine that runs."""
        await self._with_memory(
            name, partial(check_adapter_memory, self._config, self.settings(base_of(name)), name, nbytes), terms
        )

    async def _with_memory(self, name: str, check: Callable[[], None], terms: LoadTerms) -> None:
        try:
            check()
        except ResourceError:
            pause_s = self._config.fleet.agent.start_timeout_s  # until its engine has the memory
            if not terms.takes_standby or not await self.standby.give_up(f"{name} needs the memory", pause_s):
                raise
            terms.standby_ended()
            check()

    # ------------------------------------------------------------------ engines

    def settings(self, name: str) -> ModelConfig:
        """The settings of a model: those of the configured model of this name, or the defaults."""
        return self._config.model(name) or ModelConfig(name=name)

    def _home_of(self, name: str) -> Path:
        """Of a model's engines."""
        # Its name is that of its run directory, too, which is beside those of other agents of this STARLING_HOME.
        return self._agent_dir / "engines" / hashlib.sha256(f"{self._agent_dir}\0{name}".encode()).hexdigest()[:8]

    def _engine(self, entry: Source, arriving: Path | None) -> Engine:
        """`arriving`: the folder of a model that is still downloaded."""
        home = self._home_of(entry.name)
        if isinstance(entry, LocalModel):
            assert self._listen is not None
            return ExternalEngine(
                self._config, entry, home, self._session, lambda: self._free_port("127.0.0.1"), self._listen
            )
        settings = self.settings(entry.name)
        return StarlingEngine(
            self._config,
            settings,
            entry.digest,
            home,
            arriving or self.cache.models_dir,
            self._session,
            lambda: self._free_port(self._config.fleet.agent.host),
            standby=self.standby,
            kernels=self.kernels,
        )

    # ------------------------------------------------------------------ state

    def _forget_failed(self) -> None:
        failed = [name for name, one in self._placed.items() if one.state == "FAILED"]
        for name in failed[: max(0, len(failed) - MAX_FAILED)]:
            del self._placed[name]

    def _names(self) -> tuple[str, ...]:
        """The models that a successor loads again: also those that are still to be restored."""
        return tuple(dict.fromkeys((*self._placed, *self.adapters.names, *self._restoration.names)))
