"""What an agent says of itself. Reads files and /proc; asks engines."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import UNSET

from pipeline import procfs
from pipeline.catalog import pulled
from pipeline.config.schema import Config
from pipeline.fleet.bodies import (
    AgentState,
    CachedModel,
    CacheLevel,
    HeartbeatResponse,
    LoadedAdapter,
    LoadedModel,
    PrefixCursor,
    PrefixUpdate,
)
from pipeline.fleet.model_states import LOADING_STATES, is_on_gpu
from stages.agent.cache.page_cache import resident_fraction
from stages.agent.disk_threads import GPUS, LOOKS
from stages.agent.engines import local_model
from stages.agent.engines.standby import free_memory
from stages.agent.gpus import GpuUse
from stages.agent.held_prefixes import PrefixLog, read_names
from stages.agent.kv_pages.taking import bytes_of_request
from stages.agent.lease import AgentLease
from stages.agent.look import PATIENCE_S, Look
from stages.agent.memory_check import MEGABYTE
from stages.agent.models import Models
from stages.agent.placement import Placement
from stages.agent.state_file import Stored

CHAT_PATH = "/v1/chat/completions"
IN_MEMORY = 0.9  # of a file's pages: then it counts as in memory
CACHE_AGE_S = 5.0  # of what was found out about files
QUEUE_AGE_S = 0.5  # of what engines have answered, and hold
GPU_AGE_S = 5.0  # of what drivers of GPUs have answered: a question may load the driver, which takes seconds
GPU_SILENT_S = 15.0  # without an answer of them: then what is known is not reported any more
SILENT_S = 3.0  # without an answer of an engine or the disk: then it is reported that what is known is old
NO_CURSORS: Mapping[str, PrefixCursor] = {}


class Reporter:
    """Answers heartbeats, in time also if an engine or the disk does not answer: then with what is known.

    Several at once share one look at engines and files.
    """

    def __init__(
        self,
        config: Config,
        stored: Stored,
        models: Models,
        lease: AgentLease,
        clock: Callable[[], float] = time.monotonic,
        prefixes_left: Callable[[str], int] = lambda model: 0,
        patience_s: float = PATIENCE_S,
        gpus: Callable[[], GpuUse | None] = lambda: None,
    ) -> None:
        """`prefixes_left(model)`: see `LoadedModel`. `patience_s`: for engines and the disk. `gpus`: `Gpus.read`."""
        self._config = config
        self._stored = stored
        self._models = models
        self._lease = lease
        self._clock = clock
        self._prefixes_left = prefixes_left
        self._patience_s = patience_s
        self._files = Look(self._look_at_files, CACHE_AGE_S, clock, patience_s)
        self._pages = Look(self._look_at_prefixes, QUEUE_AGE_S, clock, patience_s)
        self._gpus = Look(self._look_at_gpus, GPU_AGE_S, clock, 0.0)  # no heartbeat waits for it
        self._read_gpus = gpus
        self._gpu: GpuUse | None = None  # as of the last look
        self._queues: dict[Placement, Look] = {}
        self._prefix_models: tuple[str, ...] = ()  # that orchestrators have asked for last
        self._cached: tuple[CachedModel, ...] = ()
        self._disk_free = 0
        self._disk_problem = ""
        self._prefixes: dict[str, PrefixLog] = {}  # by model

    async def report(self, prefixes_after: Mapping[str, PrefixCursor] = NO_CURSORS) -> HeartbeatResponse:
        """The state now. `prefixes_after`: models of which an orchestrator wants the prefixes, and what it has."""
        if prefixes_after:
            self._prefix_models = tuple(prefixes_after)
        self._queues = {one: self._queues.get(one) or self._queue_of(one) for one in self._models.placed}
        await asyncio.gather(*(one.refresh() for one in (*self._queues.values(), self._pages, self._files, self._gpus)))
        loaded = tuple(self.loaded(one, prefixes_after.get(one.model_id)) for one in self._models.placed)
        reasons = tuple(self.reasons())
        gpu = self._gpu if self._gpus.silent_s <= GPU_SILENT_S else None
        return HeartbeatResponse(
            agent_id=self._stored.agent_id,
            incarnation=self._stored.incarnation,
            state=state_of(loaded, reasons),
            reasons=reasons,
            lease_s=round(self._lease.remaining_s, 3),
            vllm_queue_length=sum(one.vllm_queue_length for one in loaded),
            gpu_utilization=UNSET if gpu is None or gpu.utilization is None else round(gpu.utilization, 4),
            gpu_memory_free=UNSET if gpu is None or gpu.memory_free is None else gpu.memory_free,
            memory_free=procfs.available_memory(),
            memory_available=round(free_memory(), 4),
            disk_free=self._disk_free if not self._files_silent_s else 0,
            files_silent_s=self._files_silent_s,
            max_models=self._config.fleet.agent.max_models,
            download_bytes_per_s=round(self._models.download_rate, 1),
            shares_pieces=self._config.fleet.agent.peers,
            exchanges_kv_pages=self._config.fleet.agent.page_mb > 0,
            counts_page_tenants=self._config.fleet.agent.page_mb > 0,
            kv_page_bytes=bytes_of_request(self._config.fleet.agent.page_mb << 20),
            takes_signed_urls=self._models.takes_signed_urls,
            wanted_urls=self._models.wanted_urls(),
            serves_adapters=True,
            compiling=self._models.kernels.progress,
            loaded_models=loaded,
            cached_models=self._cached,
        )

    def files_changed(self) -> None:
        """Look at the files again before the next answer."""
        self._files.expire()

    def _queue_of(self, placement: Placement) -> Look:
        return Look(placement.measure, QUEUE_AGE_S, self._clock, self._patience_s)

    @property
    def _files_silent_s(self) -> float:
        return _reported(self._files)

    def _silent_s(self, placement: Placement) -> float:
        look = self._queues.get(placement)
        return _reported(look) if look is not None and placement.state == "READY" else 0.0

    async def _look_at_files(self) -> None:
        self._cached, self._disk_free, self._disk_problem = await LOOKS.run(self._look)

    async def _look_at_gpus(self) -> bool:
        try:
            self._gpu = await GPUS.run(self._read_gpus)
        except TimeoutError:
            return False
        return True

    def reasons(self) -> list[str]:
        """Why the agent is degraded."""
        found = []
        if self._lease.is_name_taken:
            found.append("another agent has this agent's id")
        elif self._lease.is_late or not self._lease.is_valid:
            found.append("the lease could not be renewed in time: the coordination store does not answer")
        found += [
            f"the engine of {one.model_id!r} keeps dying: {one.last_death}"
            for one in self._models.placed
            if one.is_dying and one.last_death
        ]
        found += [
            f"the engine of {one.model_id!r} has not answered for {silent_s:.0f} s: its queue is that of before"
            for one in self._models.placed
            if (silent_s := self._silent_s(one))
        ]
        if silent_s := self._files_silent_s:
            found.append(
                f"the disk of {self._models.cache.models_dir} has not answered for {silent_s:.0f} s: what is reported "
                "of its files is that of before"
            )
        found += [problem for problem in (self._models.disk_error, self._disk_problem) if problem]
        return found

    async def _look_at_prefixes(self) -> None:
        """Look at what the engines of models hold whose prefixes are asked for."""
        placed = {one.model_id: one for one in self._models.placed if one.state == "READY"}
        self._prefixes = {name: log for name, log in self._prefixes.items() if name in placed}
        for name in self._prefix_models:
            one = placed.get(name)
            folder = one.engine.kv_arenas if one is not None and one.engine is not None else None
            if one is None or folder is None:
                continue
            incarnation = self._incarnation_of(one)
            held = await LOOKS.run(read_names, folder)
            log = self._prefixes.get(name)
            if log is None or log.incarnation != incarnation:
                log = self._prefixes[name] = PrefixLog(incarnation)
            log.observe(held)

    def _incarnation_of(self, placement: Placement) -> str:
        return f"{self._stored.incarnation}-{placement.incarnation}"

    def _published(self, placement: Placement, cursor: PrefixCursor | None) -> PrefixUpdate | None:
        """The changes since then; None if the engine has another incarnation, or was not looked at yet."""
        log = self._prefixes.get(placement.model_id)
        incarnation = self._incarnation_of(placement)
        if cursor is None or log is None or not log.incarnation == cursor.incarnation == incarnation:
            return None
        return log.since(cursor.number)

    def loaded(self, placement: Placement, cursor: PrefixCursor | None = None) -> LoadedModel:
        """A placed model. `cursor`: what is known of its prefixes; None: they are not asked for."""
        engine, entry, promises = placement.engine, placement.entry, placement.capabilities
        is_ready = placement.state == "READY" and engine is not None
        # Requests that a withdrawn engine has are still reached there.
        reached = engine if is_ready or placement.is_withdrawn else None
        problem = placement.error.message if placement.error is not None else placement.last_death
        adapter = engine.adapter if engine is not None else self._adapter_of(placement.model_id)
        return LoadedModel(
            model_id=placement.model_id,
            model_state=placement.state,
            cache_level=self._resident(adapter)
            if is_ready and not placement.is_arriving
            else self.level(entry.digest, placement.model_id),
            engine=adapter,
            inference_endpoint_url=engine.url + CHAT_PATH if engine is not None and is_ready else "",
            engine_url=reached.url if reached is not None else "",
            engine_key=reached.key if reached is not None else "",
            engine_incarnation=self._incarnation_of(placement) if is_ready else "",
            digest=entry.digest,
            kv_type=promises.kv_type,
            numerics=promises.numerics,
            can_continue=promises.can_continue,
            page_tokens=promises.page_tokens,
            continues_text=promises.continues_text,
            takes_conversations=promises.takes_conversations,
            silent_s=self._silent_s(placement),
            running=placement.queue.running,
            vllm_queue_length=placement.queue.waiting,
            kv_cache_hit_rate=placement.queue.hit_rate,
            bytes=entry.nbytes,
            restarts=placement.restarts,
            load_s=round(placement.load_s, 3),
            progress=placement.progress,
            error=problem,
            requests=placement.queue.submitted,
            sessions=placement.queue.sessions,
            publishes_prefixes=is_ready and engine is not None and engine.kv_arenas is not None,
            held_pages=len(self._prefixes.get(placement.model_id, ())) if is_ready else 0,
            prefixes=self._published(placement, cursor) if is_ready else None,
            moves_sessions=is_ready and engine is not None and engine.control_dir is not None,
            checks_sessions=is_ready and engine is not None and engine.control_dir is not None,
            sessions_moving=placement.queue.sessions_moving if is_ready else 0,
            moves_prefixes=is_ready
            and engine is not None
            and engine.kv_arenas is not None
            and engine.control_dir is not None
            and self._config.fleet.agent.page_mb > 0,
            prefixes_left=self._prefixes_left(placement.model_id) if is_ready else 0,
            adapters=tuple(
                LoadedAdapter(
                    name=one.name,
                    digest=one.digest,
                    bytes=one.nbytes,
                    is_ready=is_ready and placement.serving.get(one.name) == one.digest,
                    running=placement.adapter_use(one.name).running,
                    requests=placement.adapter_use(one.name).ended,
                )
                for one in placement.adapters.values()
            ),
        )

    def _adapter_of(self, name: str) -> str:
        other = self._models.other_engines.get(name)
        return other.engine if other is not None else "starling"

    def _resident(self, adapter: str) -> CacheLevel:
        """Where a model is whose engine answers."""
        return "GPU_RESIDENT" if is_on_gpu(adapter, has_gpu=self._gpu is not None) else "CPU_RESIDENT"

    def level(self, digest: str, name: str) -> CacheLevel:
        """Where the files of a model are, as of the last look."""
        wanted = (digest, f"{self._adapter_of(name)}:{name}")
        found = next((one for one in self._cached if one.digest in wanted and one.is_complete), None)
        return found.cache_level if found is not None else "REMOTE"

    def _look(self) -> tuple[tuple[CachedModel, ...], int, str]:
        """The models directory, and what `probe_disk` says of its disk. Runs in a thread."""
        cache = self._models.cache
        folder = cache.models_dir
        names: dict[str, list[str]] = {}
        for record, _ in pulled.read_all(folder):
            if pulled.is_complete(folder, record.entry):
                names.setdefault(record.entry.digest, []).append(record.entry.name)
        found = [
            CachedModel(
                digest=digest,
                names=tuple(sorted(several)),
                cache_level=_level(folder / f"{digest}.bin"),
                bytes=_nbytes(folder / f"{digest}.bin") + _nbytes(folder / f"{digest}.idx"),
                is_complete=True,
            )
            for digest, several in sorted(names.items())
        ]
        found += [
            CachedModel(
                digest=item.key.partition(".")[0],
                names=(),
                cache_level="NVME_CACHED",
                bytes=item.nbytes,
                is_complete=False,
            )
            for item in cache.items()
            if item.key.partition(".")[0] not in names
        ]
        found += [
            CachedModel(
                digest=f"{one.engine}:{one.model}",
                names=(one.model,),
                cache_level=_level(path) if (path := Path(one.path)).is_file() else "NVME_CACHED",
                bytes=nbytes,
                is_complete=True,
                engine=one.engine,
            )
            for one in self._models.other_engines.values()
            if (nbytes := local_model.nbytes(one))
        ]
        return tuple(found), *probe_disk(folder, self._config.fleet.free_mb * MEGABYTE)


def _reported(look: Look) -> float:
    """For how long there has been no answer, s; 0.0 while that is no reason for doubt."""
    return round(look.silent_s, 1) if look.silent_s > SILENT_S else 0.0


def state_of(loaded: tuple[LoadedModel, ...], reasons: tuple[str, ...]) -> AgentState:
    """The state of an agent, in the order of importance."""
    if reasons:
        return "DEGRADED"
    if any(one.model_state in LOADING_STATES for one in loaded):
        return "LOADING_MODEL"
    return "INFERRING" if any(one.running or one.vllm_queue_length for one in loaded) else "IDLE"


def probe_disk(folder: Path, floor: int) -> tuple[int, str]:
    """Bytes that downloads may take, and why files cannot be written there ("": they can)."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
        return max(0, shutil.disk_usage(folder).free - floor), ""
    except OSError as error:
        return 0, f"{folder} cannot be written: {error.strerror}"


def _level(path: Path) -> CacheLevel:
    return "DRAM_CACHED" if resident_fraction(path) >= IN_MEMORY else "NVME_CACHED"


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
