"""KV pages of a stream that moves: sent from its agent to its successor where that is faster than computing them.

    estimate    computing: the part of the prompt that the successor lacks and the output, at its measured speed.
                Sending: a fixed cost, and the pages' bytes at the speed measured between the two agents
    give        the agent of the stream counts the pages that both agents have room for, and gives a ticket for them
    take        the successor gets them with the ticket, for the request that is sent to it next

If not all pages are given, what is computed in any case is no part of the comparison.
All are estimates in seconds, as those of routing.  Whatever fails, or takes too long, is computed: the answer has the
same bytes.  Bounded per tenant, whose other streams wait for their turn; the number in total is that of streams that
move at once.  Without sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from pipeline.api.output_tokens import RELAY, read_relay
from pipeline.errors import InvalidRequest, ModelUnavailable, StarlingError
from pipeline.fleet.bodies import (
    GivePagesRequest,
    GivePagesResponse,
    LoadedModel,
    TakePagesRequest,
    TakePagesResponse,
)
from pipeline.fleet.records import AgentRecord
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.decisions import DecisionLog, PageTransfer
from stages.orchestrator.forward import Forward
from stages.orchestrator.rates import PEER_BYTES_PER_S, Mean, Rates
from stages.orchestrator.router import Route
from stages.orchestrator.score import loaded

log = logging.getLogger("starling.orchestrator")

FIXED_S = 0.05  # of a transfer: three calls, and the pages' copies
TOKEN_BYTES = 4  # of text, as rates.py counts
GIVE_S = 5.0  # for the count of the pages
LEAST_S, MOST_S = 5.0, 10.0  # for which a successor waits for pages; the stream goes on meanwhile
MARGIN_S = 1.0  # for its answer to arrive
MAX_OF_TENANT = 2  # transfers at once
PAUSE_S = 30.0  # after a failure between two agents: further streams must not wait for the same one
SPEED_S = 600.0  # for which a measured speed counts: a link that was slow once is tried again
MAX_LINKS = 10_000  # pairs of agents of which something is kept
# What concerns one transfer alone: its size, its request, the turns of its tenant.  Others may succeed meanwhile.
OF_ONE_TRANSFER = frozenset(
    {"OVERLOADED", "NOT_FOUND", "MODEL_NOT_FOUND", "REQUEST_TOO_LARGE", "INSUFFICIENT_RESOURCES"}
)


class Calls(Protocol):
    """Calls of the agents' API."""

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        """The answer's body. Raises `StarlingError`."""


class Nodes(Protocol):
    """What is asked of the registry."""

    def find(self, agent_id: str) -> AgentRecord | None:
        """The record of an agent."""

    def answer_of(self, agent_id: str) -> Any:
        """Its last answer to a poll; None if it has not answered."""


class _Speed(Mean):
    """Measured between two agents, bytes/s."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        super().__init__(PEER_BYTES_PER_S)
        self.at = 0.0  # of the last sample, s of the clock


class _Turns(asyncio.Semaphore):
    """Transfers of one tenant."""

    def __init__(self) -> None:
        super().__init__(MAX_OF_TENANT)
        self.n_users = 0  # that wait, or have a turn


class PageTransfers:
    """One per orchestrator. `note(kind, agent=, model=, text=)`: an event. `clock`: monotonic, s."""

    def __init__(
        self,
        calls: Calls,
        nodes: Nodes,
        rates: Rates,
        decisions: DecisionLog,
        note: Callable[..., object],
        clock: Callable[[], float],
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.nbytes = 0  # sent
        self._calls = calls
        self._nodes = nodes
        self._rates = rates
        self._decisions = decisions
        self._note = note
        self._clock = clock
        self._speeds: dict[tuple[str, str], _Speed] = {}  # by source and target
        self._paused: dict[tuple[str, str], float] = {}  # until when, s of the clock
        self._turns: dict[str, _Turns] = {}  # by tenant

    async def bring(self, source_id: str, route: Route, forward: Forward, copy_id: str, n_output: int) -> None:
        """Send the pages of `forward` to the agent of `route`, if that is faster than computing them there.

        `copy_id`: the request that the agent gets next.  `n_output`: tokens of the output so far.  Raises nothing.
        """
        model = forward.routed.model
        source, target = self._nodes.find(source_id), self._nodes.find(route.agent_id)
        if source is None or target is None:
            return
        sizes = self._sizes(source_id, model), self._sizes(route.agent_id, model)
        if sizes[0] is None or sizes[1] is None or (all(sizes) and sizes[0] != sizes[1]):
            return
        work = _Work(forward, route, n_output, self._rates.of(route.agent_id, model).prefill_s_per_byte.value)
        made = PageTransfer(source=source_id, target=route.agent_id, computing_s=round(work.saved_s(1.0), 6))
        if made.computing_s > FIXED_S:
            try:
                async with self._turn(_tenant_of(forward), min(MOST_S, made.computing_s)):
                    await self._try(source, target, work, copy_id, made)
            except TimeoutError:
                made.reason = f"{MAX_OF_TENANT} transfers of its tenant are under way"
        self._made(forward, made, made.outcome or "computed")

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str, wait_s: float) -> AsyncIterator[None]:
        """One of the tenant's turns. Raises `TimeoutError` if none becomes free within `wait_s`."""
        turns = self._turns.setdefault(tenant, _Turns())
        turns.n_users += 1
        try:
            async with asyncio.timeout(wait_s):
                await turns.acquire()
            try:
                yield
            finally:
                turns.release()
        finally:
            turns.n_users -= 1
            if not turns.n_users:
                del self._turns[tenant]

    async def _try(
        self, source: AgentRecord, target: AgentRecord, work: _Work, copy_id: str, made: PageTransfer
    ) -> None:
        """Set `made.outcome`, or `made.reason` alone. Raises nothing."""
        link = source.agent_id, target.agent_id
        if self._clock() < self._paused.get(link, float("-inf")):
            made.reason = f"a transfer between these agents failed in the last {PAUSE_S:.0f} s"
            return
        begun = self._clock()
        try:
            made.outcome = await self._bring(source, target, work, copy_id, made)
        except StarlingError as error:
            made.reason, made.outcome = error.message[:300], "failed"
            self.failed(*link, error)
            log.warning(
                "KV pages were not sent",
                extra={"request_id": work.forward.id, "agent": source.agent_id, "reason": error.message},
            )
        made.took_s = round(self._clock() - begun, 6)

    async def _bring(
        self, source: AgentRecord, target: AgentRecord, work: _Work, copy_id: str, made: PageTransfer
    ) -> str:
        """What was done. Raises `StarlingError`."""
        model, link = work.forward.routed.model, (source.agent_id, target.agent_id)
        most, knows_bound = self._most(target.agent_id), self._most(source.agent_id) > 0
        ask = GivePagesRequest(
            model_id=model,
            request_id=work.forward.id,
            agent_id=target.agent_id,
            max_bytes=most if knows_bound else 0,
        )
        given = _decoded(await self._calls.post(source, "/give_pages", msgspec.json.encode(ask), GIVE_S), _GIVEN)
        made.bytes, made.pages = given.bytes, given.pages
        if 0 < most < given.bytes:
            made.reason = f"agent {target.agent_id} takes at most {most} bytes (fleet.agent.page_mb)"
            return "computed"
        if given.of_pages > given.pages:
            made.computing_s = round(work.saved_s(given.pages / given.of_pages), 6)
        known = self._speeds.get(link)
        made.sending_s = round(FIXED_S + given.bytes / (known.value if known is not None else PEER_BYTES_PER_S), 6)
        if made.sending_s >= made.computing_s:
            return "computed"
        limit_s = min(MOST_S, max(LEAST_S, made.computing_s))
        take = TakePagesRequest(
            model_id=model,
            request_id=copy_id,
            source=source,
            ticket=given.ticket,
            bytes=given.bytes,
            timeout_ms=int(1000 * limit_s),
            tenant=_tenant_of(work.forward),
        )
        begun = self._clock()
        try:
            raw = await self._calls.post(target, "/take_pages", msgspec.json.encode(take), limit_s + MARGIN_S)
        except StarlingError:
            took_s = self._clock() - begun
            if took_s >= limit_s:
                self.late(*link, given.bytes, took_s)
            raise
        taken = _decoded(raw, _TAKEN)
        self.measured(*link, given.bytes, taken.seconds)
        return "sent"

    def speed(self, source_id: str, target_id: str) -> float:
        """Of pages between two agents: measured lately, or a default, bytes/s. 0: they exchange none now."""
        if self._clock() < self._paused.get((source_id, target_id), float("-inf")):
            return 0.0
        known = self._speeds.get((source_id, target_id))
        return known.value if known is not None else PEER_BYTES_PER_S

    def measured(self, source_id: str, target_id: str, nbytes: int, seconds: float) -> None:
        """Pages were sent from one agent to another."""
        self.nbytes += nbytes
        if seconds > FIXED_S and (speed := self._speed((source_id, target_id))) is not None:
            speed.add(nbytes / (seconds - FIXED_S / 2))

    def late(self, source_id: str, target_id: str, nbytes: int, seconds: float) -> None:
        """Pages were not sent from one agent to another in `seconds`: the speed is lower than that."""
        if (speed := self._speed((source_id, target_id))) is not None:
            speed.value = min(speed.value, nbytes / seconds)

    def failed(self, source_id: str, target_id: str, error: StarlingError) -> None:
        """Pages were not sent: none are for a while, unless the error is of that transfer alone."""
        if error.code not in OF_ONE_TRANSFER and len(self._paused) < MAX_LINKS:
            self._paused[source_id, target_id] = self._clock() + PAUSE_S

    def _speed(self, link: tuple[str, str]) -> _Speed | None:
        """The speed to which a sample is added now; None: too many are kept."""
        if link not in self._speeds and len(self._speeds) >= MAX_LINKS:
            return None
        speed = self._speeds.setdefault(link, _Speed())
        speed.at = self._clock()
        return speed

    def keep_only(self, agents: set[str]) -> None:
        """Forget agents that have left, pauses that have ended, and old speeds."""
        now = self._clock()
        self._speeds = {
            link: speed for link, speed in self._speeds.items() if agents.issuperset(link) and now < speed.at + SPEED_S
        }
        self._paused = {link: until for link, until in self._paused.items() if until > now and agents.issuperset(link)}

    def _sizes(self, agent_id: str, model: str) -> int | None:
        """Tokens of a page of the model there, 0: not known. None: agent or engine exchange no pages."""
        details = self._nodes.answer_of(agent_id)
        running: LoadedModel | None = loaded(details, model) if details is not None else None
        if details is None or not details.exchanges_kv_pages or running is None or not running.publishes_prefixes:
            return None
        return running.page_tokens

    def _most(self, agent_id: str) -> int:
        """Bytes of one request's pages that the agent gives or takes; 0: not known."""
        details = self._nodes.answer_of(agent_id)
        return int(details.kv_page_bytes) if details is not None else 0

    def _made(self, forward: Forward, made: PageTransfer, outcome: str) -> None:
        made.outcome = outcome
        self.outcomes[outcome] += 1
        self._decisions.add_transfer(forward.id, made)
        if outcome != "computed":
            text = f"{made.pages} pages, {made.bytes} bytes from {made.source}: {outcome} {made.reason}".strip()
            self._note("kv-pages", agent=made.target, model=forward.routed.model, text=text)


class _Work(NamedTuple):
    """What a successor computes if it gets no pages."""

    forward: Forward
    route: Route
    n_output: int  # tokens
    s_per_byte: float

    def saved_s(self, part: float) -> float:
        """Time that is saved by the leading `part` (0 to 1) of all pages; the successor has the first ones itself."""
        output_bytes = TOKEN_BYTES * self.n_output
        held = max(0, self.forward.routed.prompt_bytes - self.route.new_bytes)
        return max(0.0, part * (held + self.route.new_bytes + output_bytes) - held) * self.s_per_byte


_GIVEN = msgspec.json.Decoder(GivePagesResponse)
_TAKEN = msgspec.json.Decoder(TakePagesResponse)


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise ModelUnavailable(f"an agent answers nonsense about KV pages: {error}") from None


def _tenant_of(forward: Forward) -> str:
    """The tenant for whom the request is forwarded."""
    try:
        return read_relay(forward.headers.get(RELAY, "1")).tenant
    except InvalidRequest:
        return ""
