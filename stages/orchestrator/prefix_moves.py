"""The prefixes that most requests shared at an agent that drains go to the agents that get such requests from now on.

    list    the agent's engine names its most used prefixes: the names of their pages, how many sequences have held
            them (stages/kv/prefix_exchange.py)
    choose  those that no other agent holds, as far as agents publish that, get one: the agent that holds the most of
            their first pages, or else the one that routing prefers.  Prefixes that begin alike go to the same agent
    send    the pages of one tenant to one agent at a time: a ticket of the source, which the target redeems

It comes after everything else that a drain moves: when streams and sessions have left, or `WAIT_S` after its begin.
Best effort, and bounded: in bytes, prefixes and time, in total and per tenant.  What is left out is computed at the
first request that needs it.  Requests find the pages because agents publish what their engines hold.

One orchestrator, the elected one, does this.  All of them see in the agent's heartbeats what is left.  Without sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from pipeline.api.page_owner import forwarded_salt, key_owner, payer_of
from pipeline.errors import ModelNotFound, ModelUnavailable, Overloaded, StarlingError
from pipeline.fleet.bodies import (
    MAX_IDLE_S,
    MAX_PREFIXES,
    GivePagesResponse,
    GivePrefixesRequest,
    HotPrefix,
    ListPrefixesRequest,
    ListPrefixesResponse,
    LoadedModel,
    TakePagesResponse,
    TakePrefixesRequest,
)
from pipeline.fleet.records import AgentRecord
from shm.decoding import DECODE_ERRORS
from shm.sent_pages import HEAD_BYTES, MAX_KEPT_BYTES
from stages.orchestrator.held_prefixes import engine_name
from stages.orchestrator.interfaces import NodeView, RoutedRequest
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.score import loaded, version_of

log = logging.getLogger("starling.orchestrator")

WAIT_S = 10.0  # for streams and sessions to leave before
LIMIT_S = 10.0  # for all prefixes of a model
CALL_S = 5.0  # of a call that sends no pages
MARGIN_S = 1.0  # for an answer to arrive
LIST_PAGES = 2048  # of a model that an agent is asked for
MAX_BYTES = 256 << 20  # of one model of one drain
TENANT_SHARE = 2  # a tenant gets at most one n-th of it, of the prefixes too; what is shared by all gets all of it
MAX_REPORTS = 64  # drains that `why` explains

T = TypeVar("T")


class Calls(Protocol):
    """Calls of the agents' API."""

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        """The answer's body. Raises `StarlingError`."""


class Nodes(Protocol):
    """What is asked of the registry."""

    def find(self, agent_id: str) -> AgentRecord | None:
        """The record of an agent."""


async def _no_tenants() -> Mapping[str, str]:
    return {}


class PrefixMove(msgspec.Struct, kw_only=True):
    """What was done with one prefix."""

    model: str
    tail: str  # hash of its last page
    tenant: str  # their owner, as engines name it
    pages: int
    uses: int
    target: str = ""  # agent
    outcome: str = ""  # "sent"; "held": another agent has it; "skipped", "failed"
    reason: str = ""


class _Batch(NamedTuple):
    """What is sent at once."""

    target: str
    tenant: str  # their owner, as the target gets it
    account: str  # the name of their tenant; "": not known, or the target does not count by it
    prefixes: list[tuple[HotPrefix, PrefixMove]]
    names: set[int]  # of all their pages; prefixes share some
    page_bytes: int


class PrefixMoves:
    """One per orchestrator. `note(kind, agent=, model=, text=)`: an event. `clock`: monotonic, s."""

    def __init__(
        self, calls: Calls, nodes: Nodes, router: ScoreRouter, note: Callable[..., object], clock: Callable[[], float]
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.nbytes = 0  # sent
        # Names of tenants by the salts that engines get for them (`RequestIds.tenants`).
        self.tenants: Callable[[], Awaitable[Mapping[str, str]]] = _no_tenants
        self._calls = calls
        self._nodes = nodes
        self._router = router
        self._note = note
        self._clock = clock
        self._since: dict[tuple[str, float], float] = {}  # drains: when they were seen first, s of the clock
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  # by agent and model
        # By drain, model and the engine's incarnation: once in a drain.
        self._done: set[tuple[tuple[str, float], str, str]] = set()
        self._reports: OrderedDict[str, list[PrefixMove]] = OrderedDict()  # by agent

    def begin_round(self) -> None:
        """Look after all agents that drain."""
        now, table = self._clock(), self._router.table
        # An agent may have ended a drain and begun another one since the last round.
        drains = {(view.agent_id, view.draining_since): view for view in table if view.is_draining}
        self._since = {drain: self._since.get(drain, now) for drain in drains}
        self._done = {key for key in self._done if key[0] in drains}
        for drain, view in drains.items():
            is_due = now >= self._since[drain] + WAIT_S or not self._has_more(view)
            for one in view.details.loaded_models if view.health == "READY" and is_due else ():
                key, once = (view.agent_id, one.model_id), (drain, one.model_id, one.engine_incarnation)
                if _moves(one) and key not in self._tasks and once not in self._done:
                    self._done.add(once)
                    task = asyncio.get_running_loop().create_task(self._run(view.agent_id, one))
                    self._tasks[key] = task
                    task.add_done_callback(partial(self._ended, key))

    def _has_more(self, view: NodeView) -> bool:
        """Whether the agent has streams or sessions, which go first."""
        models = view.details.loaded_models
        return self._router.under_way(view.agent_id) > 0 or any(
            one.running or one.vllm_queue_length or one.sessions or one.sessions_moving for one in models
        )

    def _ended(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("prefixes were not sent", extra={"agent": key[0], "model": key[1]}, exc_info=error)

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def why(self, agent_id: str) -> list[PrefixMove] | None:
        """What was done with each prefix of an agent that drains, or did; None: it has not drained here lately."""
        return self._reports.get(agent_id)

    # ---------------------------------------------------------------- one drain

    async def _run(self, source: str, one: LoadedModel) -> None:
        report = self._reports.setdefault(source, [])
        report[:] = [move for move in report if move.model != one.model_id]
        self._reports.move_to_end(source)
        while len(self._reports) > MAX_REPORTS:
            self._reports.popitem(last=False)
        moves: list[PrefixMove] = []
        try:
            await self.run(source, one, moves)
        except StarlingError as error:
            facts = {"agent": source, "model": one.model_id, "reason": error.message}
            log.warning("prefixes cannot be sent now", extra=facts)
        self.outcomes.update(move.outcome for move in moves)
        report += moves
        if moves:
            counts = Counter(move.outcome for move in moves)
            pages = sum(move.pages for move in moves if move.outcome == "sent")
            text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            self._note("prefixes-sent", agent=source, model=one.model_id, text=f"{text}; {pages} pages")

    async def run(self, source: str, one: LoadedModel, moves: list[PrefixMove]) -> None:
        """Send what is worth it; `moves` gets what was done. Raises `StarlingError`."""
        deadline = self._clock() + LIMIT_S
        asked = ListPrefixesRequest(model_id=one.model_id, limit=LIST_PAGES)
        found = await self._call(source, "/list_prefixes", asked, ListPrefixesResponse)
        try:
            prefixes = found.prefixes[:MAX_PREFIXES]
            moves += [
                PrefixMove(
                    model=one.model_id,
                    tail=prefix.tail,
                    tenant=prefix.tenant,
                    pages=len(_names(prefix)),
                    uses=prefix.uses,
                )
                for prefix in prefixes
            ]
            tenants = await self.tenants()
            for batch in self._batches(source, one, list(zip(prefixes, moves)), found.page_bytes, tenants):
                await self._send(source, one.model_id, batch, deadline)
        finally:
            # It drains: whether this call arrives matters to what waits for the drain alone, and for a bounded time.
            await self._call(
                source, "/list_prefixes", ListPrefixesRequest(model_id=one.model_id, limit=0), ListPrefixesResponse
            )

    def _batches(
        self,
        source: str,
        one: LoadedModel,
        prefixes: list[tuple[HotPrefix, PrefixMove]],
        page_bytes: int,
        tenants: Mapping[str, str],
    ) -> list[_Batch]:
        """What is sent to whom, the most used first; sets the outcome of the others."""
        fit = self._fit(source, one)
        source_bytes = self._page_bytes_of(source)
        targets: dict[tuple[str, int], str] = {}  # by tenant and first page
        batches: dict[tuple[str, str], _Batch] = {}
        n_bytes: Counter[str] = Counter()  # by tenant, or by owner where the tenant is not known
        for prefix, move in prefixes:
            names = _names(prefix)
            held = {name: self._router.prefixes.count_held(engine, names) for name, engine in fit.items()}
            if not names or not fit:
                move.outcome, move.reason = "skipped", "no other agent has the model ready and takes pages"
                continue
            best = max(held.values())
            if best == len(names):
                move.outcome, move.target = "held", next(name for name, n in held.items() if n == best)
                continue
            first = prefix.tenant, names[0]
            target = targets.get(first) or self._target(one.model_id, [name for name, n in held.items() if n == best])
            if not target:
                move.outcome, move.reason = "skipped", "no other agent gets requests for the model now"
                continue
            targets[first] = move.target = target
            # Shared pages are their group's.
            account = tenants.get(forwarded_salt(prefix.tenant), "") if prefix.tenant else ""
            payer = account or payer_of(prefix.tenant)
            is_counted = self._counts_tenants(target)
            owner = prefix.tenant if is_counted else key_owner(prefix.tenant)
            batch = batches.get((target, owner))
            if batch is None:
                batch = _Batch(target, owner, account if is_counted else "", [], set(), page_bytes)
            part = TENANT_SHARE if payer else 1
            most = min(source_bytes, self._page_bytes_of(target), MAX_KEPT_BYTES // part)
            room = min(
                most - HEAD_BYTES - len(batch.names) * page_bytes,
                MAX_BYTES // part - n_bytes[payer],
                MAX_BYTES - n_bytes.total(),
            )
            new = [name for name in names if name not in batch.names]
            added = new[: max(0, room) // max(1, page_bytes)]  # the first ones, which are of use without the others
            if new and not added:
                move.outcome, move.reason = (
                    "skipped",
                    "the bound of what is sent of its tenant, or at once, is reached",
                )
                continue
            if len(added) < len(new):
                move.pages, move.reason = len(names) - len(new) + len(added), f"the first of {len(names)} pages"
            n_bytes[payer] += len(added) * page_bytes
            batch.names.update(added)
            batch.prefixes.append((prefix, move))
            batches[target, owner] = batch
        return list(batches.values())

    def _fit(self, source: str, one: LoadedModel) -> dict[str, str]:
        """The agents that may get pages of the model: the names of their engines."""
        found: dict[str, str] = {}
        for view in self._router.table:
            other = loaded(view.details, one.model_id)
            if (
                view.agent_id != source
                and view.may_start
                and view.health == "READY"
                and other is not None
                and _moves(other)
                and version_of(other) == version_of(one)
                and other.page_tokens == one.page_tokens
            ):
                found[view.agent_id] = engine_name(view.agent_id, other)
        return found

    def _target(self, model: str, names: list[str]) -> str:
        """The one of these agents that routing prefers; "" if none gets requests now."""
        others = frozenset(view.agent_id for view in self._router.table if view.agent_id not in names)
        try:
            return self._router.choose(RoutedRequest(request_id="", model=model, excluded=others), "prefix").agent_id
        except (ModelNotFound, ModelUnavailable, Overloaded):
            return ""

    def _counts_tenants(self, agent_id: str) -> bool:
        return any(view.details.counts_page_tenants for view in self._router.table if view.agent_id == agent_id)

    def _page_bytes_of(self, agent_id: str) -> int:
        """Bytes of pages that the agent gives or takes at once."""
        return next((view.details.kv_page_bytes for view in self._router.table if view.agent_id == agent_id), 0)

    # ---------------------------------------------------------------- calls

    async def _send(self, source: str, model: str, batch: _Batch, deadline: float) -> None:
        """Send a batch, and set the outcomes. Raises nothing."""
        rest_s = deadline - self._clock()
        outcome = reason = ""
        try:
            if rest_s <= 0:
                outcome, reason = "skipped", f"the time for prefixes ({LIMIT_S:g} s) is over"
            else:
                self.nbytes += await self._bring(source, model, batch, rest_s)
                outcome = "sent"
        except StarlingError as error:
            outcome, reason = "failed", error.message[:300]
            log.warning("prefixes were not sent", extra={"agent": source, "model": model, "reason": error.message})
        for _, move in batch.prefixes:
            move.outcome, move.reason = outcome, reason or move.reason

    async def _bring(self, source: str, model: str, batch: _Batch, rest_s: float) -> int:
        """The bytes that were sent. Raises `StarlingError`."""
        record = self._record(source)
        asked = GivePrefixesRequest(
            model_id=model,
            tails=tuple(prefix.tail for prefix, _ in batch.prefixes),
            agent_id=batch.target,
            max_bytes=min(
                self._page_bytes_of(source),
                self._page_bytes_of(batch.target),
                HEAD_BYTES + len(batch.names) * batch.page_bytes,
            ),
        )
        given = await self._call(source, "/give_prefixes", asked, GivePagesResponse)
        take = TakePrefixesRequest(
            model_id=model,
            source=record,
            ticket=given.ticket,
            bytes=given.bytes,
            timeout_ms=max(1, int(1000 * rest_s)),
            tenant=batch.tenant,
            account=batch.account,
            uses=max(1, min(prefix.uses for prefix, _ in batch.prefixes)),
            idle_s=min(MAX_IDLE_S, max(prefix.idle_s for prefix, _ in batch.prefixes)),
        )
        await self._call(batch.target, "/take_prefixes", take, TakePagesResponse, rest_s + MARGIN_S)
        return given.bytes

    def _record(self, agent_id: str) -> AgentRecord:
        record = self._nodes.find(agent_id)
        if record is None:
            raise ModelUnavailable(f"agent {agent_id} is not there")
        return record

    async def _call(
        self, agent_id: str, path: str, asked: msgspec.Struct, kind: type[T], timeout_s: float = CALL_S
    ) -> T:
        raw = await self._calls.post(self._record(agent_id), path, msgspec.json.encode(asked), timeout_s)
        try:
            return msgspec.json.decode(raw, type=kind)
        except DECODE_ERRORS as error:
            raise ModelUnavailable(f"agent {agent_id} answers nonsense about prefixes: {error}") from None


def report(moves: list[PrefixMove]) -> list[Any]:
    """As operators see it."""
    shown: list[dict[str, Any]] = [msgspec.to_builtins(move) for move in moves]
    for one in shown:
        del one["tenant"]  # as engines name it: the salt of its pages
    return shown


def _moves(one: LoadedModel) -> bool:
    return one.model_state == "READY" and one.moves_prefixes and bool(version_of(one))


def _names(prefix: HotPrefix) -> list[int]:
    names: list[int] = np.frombuffer(prefix.names[: len(prefix.names) // 8 * 8], "<u8").tolist()
    return names
