"""Loads and unloads models on agents, for requests, placements and idle models. Without sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from pipeline.api.adapter_names import base_of
from pipeline.api.json_body import CONTENT_TYPE
from pipeline.errors import Conflict, ModelUnavailable, ResourceError, StarlingError, StorageUnavailable
from pipeline.fleet import token
from pipeline.fleet.bodies import LoadModelRequest, UnloadModelRequest
from pipeline.fleet.records import AgentRecord
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.fleet_api import EventLog
from stages.orchestrator.forward import NotRefused, StillLoading, read_error, read_param
from stages.orchestrator.rates import DISK_BYTES_PER_S
from stages.orchestrator.registry import Registry
from stages.orchestrator.router import Published, ScoreRouter
from stages.orchestrator.score import Residence, loaded, residence
from stages.orchestrator.signed_urls import UrlSigner
from stages.orchestrator.upstream import Client, Unreachable, read_whole

log = logging.getLogger("starling.orchestrator")

LOAD_MARGIN_S = 10.0  # beyond fleet.orchestrator.load_timeout_ms, for the agent's own error to arrive
RETRY_S = 0.5  # for an engine that has ended, or an adapter that may leave
MOST_WAITS = 20  # of RETRY_S, for an adapter that may leave: others are loading, or have requests
LEAST_START_S = 0.01  # of an engine, besides reading its model: disks may be faster than a score expects
CHECKS = 3  # polls of an agent that has loaded a model: on a busy host an answer may be late
REFUSED_S = 600.0  # for which models need not leave in vain: other processes of a host may end
ADAPTERS = "adapters"  # param of an agent's refusal that ends when another adapter of the model leaves
MAX_MODELS = "fleet.agent.max_models"  # param of one that ends when any other model leaves


class AgentCalls:
    """Calls of the agents' API: over TLS where both sides have it, else with the fleet's token."""

    def __init__(self, client: Client, secret: str, *, is_tls: bool = False) -> None:
        """`is_tls`: this orchestrator has a certificate."""
        self._client = client
        self._token = token.authorization(secret)
        self._is_tls = is_tls

    def url_of(self, record: AgentRecord) -> str:
        """Where an agent is called."""
        return record.tls_url if self._is_tls and record.tls_url else record.url

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        """The answer's body. Raises `StarlingError`: the agent's, or `ModelUnavailable`."""
        url = self.url_of(record) + path
        # Over TLS the certificate stands for the token, which agents then need not know.
        headers = {"Content-Type": CONTENT_TYPE, **({} if url.startswith("https://") else self._token)}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.open("POST", url, headers, body, agent_id=record.agent_id)
                try:
                    raw = await read_whole(answer)
                finally:
                    answer.close()
        except TimeoutError:
            raise ModelUnavailable(f"{url} has not answered within {timeout_s:g} s") from None
        except Unreachable as error:
            raise ModelUnavailable(f"{url}: {error}") from None
        if answer.status not in (200, 202):
            code, message = read_error(raw)
            message = message or f"{url} answers with {answer.status}"
            raise StarlingError(code or "INTERNAL", message, read_param(raw))
        return raw


class ModelChanges:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self,
        calls: AgentCalls,
        registry: Registry,
        router: ScoreRouter,
        events: EventLog,
        published: Mapping[str, Published],
        timeout_ms: int,
        is_store_up: Callable[[], bool],
        check_agent: Callable[[str], Awaitable[bool]],
        clock: Callable[[], float],
        signer: UrlSigner,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`timeout_ms`: for a load. `check_agent(id)`: poll it, because its models have changed; whether it answers."""
        self._calls = calls
        self._registry = registry
        self._router = router
        self._events = events
        self._published = published
        self._timeout_ms = timeout_ms
        self._is_store_up = is_store_up
        self._check_agent = check_agent
        self._clock = clock
        self._signer = signer
        self._sleep = sleep
        # Models that did not fit, by model and agent: its incarnation, beside which models, until when that counts.
        self._refused: dict[tuple[str, str], tuple[str, frozenset[str], float]] = {}
        # Whether a load, of a model at an agent, is to go on.
        self.is_wanted: Callable[[str, str], bool] = lambda model, agent_id: True

    async def load(self, agent_id: str, model: str, evict: str | None = "") -> None:
        """Load a model on an agent, after another one has left. Raises `StarlingError`.

        `evict`: which one; "": one leaves if the agent needs its room, None: none does.
        """
        record = self._registry.find(agent_id)
        if record is None:
            raise NotRefused(f"agent {agent_id} has left")
        if not self._is_store_up():
            raise NotRefused(
                f"{model} is not loaded now: the coordination store (fleet.store) does not answer", retry_after_s=5.0
            )
        published = self._published.get(model)
        begun = self._clock()
        base = base_of(model)
        files = self._files_of(agent_id, base)
        try:
            adapter = await self._signer.adapter(agent_id, model)
        except StorageUnavailable as error:
            raise NotRefused(f"{model} is not loaded now: {error.message}", retry_after_s=error.retry_after_s) from None
        signed = await self._signer.begin(agent_id, base)
        request = LoadModelRequest(
            model_id=model,
            digest=published.digest if published else "",
            timeout_ms=self._timeout_ms,
            signed=signed,
            adapter_digest=published.adapter_digest if published else "",
            adapter=adapter,
        )
        body = msgspec.json.encode(request)
        besides, left, waits, may_evict = {model, base}, set[str](), 0, evict is not None
        if evict and base == model and self._is_in_vain(record, model):
            evict = ""
        try:
            while True:
                self._check_wanted(agent_id, model)
                if evict:
                    left.add(evict)
                    if await self._leaves(record, evict, model, may_wait=waits < MOST_WAITS):
                        besides.add(evict)
                    else:
                        waits += 1
                    self._check_wanted(agent_id, model)
                if not waits:
                    text = "" if may_evict else "the agents that have it are full"
                    self._events.add("load", agent=agent_id, model=model, text=text)
                try:
                    raw = await self._calls.post(record, "/load_model", body, self._timeout_ms / 1000 + LOAD_MARGIN_S)
                    if not _is_loading(raw):
                        break
                    if self._clock() - begun >= self._timeout_ms / 1000:
                        raise StillLoading(
                            f"{model} has not been loaded by agent {agent_id} within {self._timeout_ms / 1000:g} s "
                            "(fleet.orchestrator.load_timeout_ms), and is still loading there; try again later",
                            "model",
                        )
                    evict = ""  # its engine has ended meanwhile, and is started again
                    await self._sleep(RETRY_S)
                except StarlingError as error:
                    if not may_evict:
                        raise
                    evict = self._making_room(error, record, model, besides, is_repeated=base in left)
                    if not evict:
                        if waits == MOST_WAITS or not self._may_leave_later(error, agent_id, model):
                            raise
                        waits += 1
                        await self._sleep(RETRY_S)
        except StarlingError as error:
            self._events.add("load-failed", agent=agent_id, model=model, text=error.message)
            raise
        finally:
            if signed is not None:
                self._signer.end(agent_id, base)
        self._refused.pop((model, agent_id), None)
        self._events.add("loaded", agent=agent_id, model=model, text=f"{self._clock() - begun:.1f} s")
        for _ in range(CHECKS):  # requests that wait would load it once more, elsewhere, while it is not known
            if await self._check_agent(agent_id):
                break
        self._note_start(agent_id, base, files)

    def _check_wanted(self, agent_id: str, model: str) -> None:
        """Raise `Conflict` if the load is for a placement that has ended, or this process leads no more."""
        if not self.is_wanted(model, agent_id):
            raise Conflict(
                f"{model} is not placed on agent {agent_id} any more: its placement has ended, or this orchestrator "
                "does not lead now"
            )

    def _files_of(self, agent_id: str, model: str) -> Residence | None:
        """Where the files of a model are, seen from an agent that has no engine for it; None if it has one."""
        view = next((one for one in self._router.table if one.agent_id == agent_id), None)
        if view is None or self._router.is_host(view, model):
            return None
        published = self._published.get(model)
        digest, nbytes = (published.digest, published.nbytes) if published is not None else ("", 0)
        return residence(view.details, model, digest, nbytes)

    def _note_start(self, agent_id: str, model: str, files: Residence | None) -> None:
        """Measure the start of an engine whose model was on the host: any other has waited for a download."""
        if files is None or files.level not in ("DRAM_CACHED", "NVME_CACHED"):
            return
        view = next((one for one in self._router.table if one.agent_id == agent_id), None)
        running = loaded(view.details, model) if view is not None else None
        if running is None or running.model_state != "READY" or not running.load_s:
            return
        disk_s = files.nbytes / DISK_BYTES_PER_S if files.level == "NVME_CACHED" else 0.0  # as a score counts it
        self._router.rates.observe_start(agent_id, model, max(running.load_s - disk_s, LEAST_START_S))

    async def _leaves(self, record: AgentRecord, evict: str, model: str, *, may_wait: bool) -> bool:
        """Unload what makes room; false, after a while, if that is an adapter that stays. Raises `StarlingError`."""
        try:
            await self._unload(record, evict, f"makes room for {model}")
        except ModelUnavailable:
            if ":" not in evict or not may_wait:
                raise
            await self._sleep(RETRY_S)
            return False
        return True

    def _making_room(
        self, error: StarlingError, record: AgentRecord, model: str, besides: set[str], *, is_repeated: bool
    ) -> str:
        """What leaves after a refusal; "": nothing can.

        Refused for too little memory or disk, for too many adapters, or because of another version of the model.
        """
        eviction, agent_id = self._router.eviction, record.agent_id
        if error.code == Conflict.CODE and error.param == "digest":
            return "" if is_repeated else eviction.outdated_model(agent_id, model, self._published.get(model))
        if error.code != ResourceError.CODE:
            return ""
        if error.param == ADAPTERS:
            return eviction.idle_adapter(agent_id, model, besides)
        if self._is_in_vain(record, model):
            return ""
        found = eviction.idle_model(agent_id, besides)
        # A place is free when any model has left: another load, that the table does not have yet, has taken it.
        if not found and error.param != MAX_MODELS:
            now = self._clock()
            self._refused = {key: one for key, one in self._refused.items() if one[2] > now}
            beside = eviction.remaining(agent_id, besides)
            self._refused[model, agent_id] = record.incarnation, beside, now + REFUSED_S
        return found

    def _is_in_vain(self, record: AgentRecord, model: str) -> bool:
        """Whether no model need leave: what would remain then is no less than when the agent has refused this one."""
        incarnation, beside, until = self._refused.get((model, record.agent_id), ("", frozenset[str](), 0.0))
        if incarnation != record.incarnation or self._clock() >= until:
            return False
        return beside <= self._router.eviction.remaining(record.agent_id, {model, base_of(model)})

    def _may_leave_later(self, error: StarlingError, agent_id: str, model: str) -> bool:
        """Whether an adapter for which there is no room may wait: others are loading, or have requests."""
        is_full = error.code == ResourceError.CODE and error.param == ADAPTERS
        return is_full and self._router.eviction.may_adapter_leave(agent_id, model)

    async def unload_idle(self, agent_id: str, model: str, why: str) -> None:
        """Unload a model that has no requests. `why`: for the event."""
        record = self._registry.find(agent_id)
        if record is not None:
            try:
                await self._unload(record, model, why)
            except StarlingError as error:
                log.warning("a model stays", extra={"model": model, "agent": agent_id, "reason": error.message})
                self._events.add("unload-failed", agent=agent_id, model=model, text=error.message)
            await self._check_agent(agent_id)

    async def _unload(self, record: AgentRecord, model: str, why: str) -> None:
        """Unload a model that has no requests. Raises `StarlingError`: it has, or the agent does not answer."""
        self._events.add("unload", agent=record.agent_id, model=model, text=why)
        body = msgspec.json.encode(UnloadModelRequest(model_id=model, only_idle=True))
        try:
            await self._calls.post(record, "/unload_model", body, self._timeout_ms / 1000)
        except StarlingError as error:
            if error.code != Conflict.CODE:
                raise
            raise ModelUnavailable(f"{model} was not unloaded ({why}): {error.message}", retry_after_s=1.0) from None

    def progress(self, model: str) -> str:
        """How far the load of a model is, for the comments of streams that wait."""
        for view in self._router.table:
            for one in view.details.loaded_models:
                if one.model_id == base_of(model) and one.progress is not None and one.model_state != "READY":
                    progress = one.progress
                    share = f" {100 * progress.done // progress.total}%" if progress.total else ""
                    return f"{progress.phase}{share} on {view.agent_id}"
        return ""


def _is_loading(raw: bytes) -> bool:
    """Whether an agent answers that a model is not loaded yet."""
    try:
        return bool(msgspec.json.decode(raw)["status"] == "loading")
    except (*DECODE_ERRORS, KeyError, TypeError):
        return False
