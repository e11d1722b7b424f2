"""Finds the agent for the next attempt of a request: waits for one, for a model that is loading, and for agreement.

A request with an `Idempotency-Key` goes to the agent that all orchestrators have agreed on (key_claims.py), or to the
one whose engine has it from an earlier attempt: each attempt asks the others once, whichever orchestrator made the
claim. Without sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from pipeline.api import sse
from pipeline.api.adapter_names import base_of
from pipeline.api.output_tokens import RELAY, read_relay
from pipeline.errors import ModelNotFound, ModelUnavailable, Overloaded, StarlingError, cancelled_by_client
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.forward import Bounds, Forward, NotRefused, Out, Tries
from stages.orchestrator.further_copies import Turn
from stages.orchestrator.interfaces import RoutedRequest
from stages.orchestrator.key_claims import KeyClaims
from stages.orchestrator.registry import Registry
from stages.orchestrator.router import Route, ScoreRouter

log = logging.getLogger("starling.orchestrator")

COMMENT_S = 2.0  # between two comments in a stream that waits
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0  # between attempts while no agent can serve a request
CLAIMED_S = 5.0  # for the agent of a claim to be ready here, too; then another one gets the request

NextChange = Callable[[float], Awaitable[object]]  # returns when the routing table has changed, or after s seconds


class RouteFinder:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self,
        router: ScoreRouter,
        registry: Registry,
        cold: ColdLoads,
        bounds: Bounds,
        clock: Callable[[], float],
        next_change: NextChange,
        progress_of: Callable[[str], str],
        claims: KeyClaims,
    ) -> None:
        self._router = router
        self._registry = registry
        self._cold = cold
        self._bounds = bounds
        self._clock = clock
        self._next_change = next_change
        self._progress_of = progress_of
        self._claims = claims
        self._loading: dict[str, set[asyncio.Future[None]]] = {}  # by request, while it waits; done: it was cancelled
        self.locate: Callable[[Forward, Collection[str]], Awaitable[str]] | None = None  # see front.py

    async def find(self, forward: Forward, tries: Tries, out: Out | None) -> Route:
        """The route of the next attempt, whose model is ready. Raises `StarlingError`, `Refusal`."""
        pause_s = FIRST_PAUSE_S
        commented = self._clock()
        while True:
            request = tries.routed(forward)
            try:
                tries.check_referrals()
                route = self._router.choose(request, "moved" if tries.count else "new", may_copy=tries.may_copy)
            except (ModelUnavailable, Overloaded, ModelNotFound) as error:
                if isinstance(error, ModelNotFound) and not tries.was_lost:
                    raise
                may_be_there = self._registry.awaits_answers()
                if isinstance(error, ModelUnavailable) and not may_be_there and tries.begin_session(request):
                    continue
                tries.give_up(error, forward, self._bounds, may_be_there)
                tries.excluded.clear()
                if tries.waits_for_load:
                    failed = tries.unfit & self._cold.failed_at(request.model)
                    tries.unfit = failed.difference(self._router.ready_of(failed, request.model))
                await self._next_change(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                if out is not None and self._clock() - commented >= COMMENT_S:
                    commented = self._clock()
                    await comment(out, f"waiting for an agent: {error.message}")
                continue
            if route.engine is None:
                unasked = tries.excluded - tries.awaited if tries.version else ()
                is_continued = bool(tries.version) and not (forward.can_replay or forward.is_bound)
                is_vain = route.evict is not None and not tries.may_load  # else engines of its version are full
                if is_continued or is_vain or (tries.was_lost and self._is_late(route, request.model, tries)):
                    tries.excluded.add(route.agent_id)  # an engine that is loaded now does not have it, or is too late
                elif unasked:
                    await self._ask_after(min(unasked), route, forward, tries)
                else:
                    await self._load(route, forward, tries, out)
            elif not forward.is_claimed or route.engine.continues_text or await self._has_claim(route, forward, tries):
                tries.sent()
                return route

    def cancel(self, request_id: str) -> bool:
        """End the request, for each of its readers here, if it waits for a model that is loading; whether it does."""
        waiting = self._loading.get(request_id, set())
        for cancelled in waiting:
            if not cancelled.done():
                cancelled.set_result(None)
        return bool(waiting)

    def left(self, tries: Tries) -> None:
        """The request has ended."""
        if tries.claim is not None:
            self._claims.leave(tries.claim)
            tries.claim = None

    def _is_late(self, route: Route, model: str, tries: Tries) -> bool:
        """Whether a request may begin no load any more: it may join one that its agent has begun."""
        return tries.is_late(self._bounds) and route.agent_id not in self._cold.agents_of(model)

    async def _has_claim(self, route: Route, forward: Forward, tries: Tries) -> bool:
        """Whether the request may be sent to the route's agent; else it must be chosen again, and may have to wait."""
        if route.agent_id in (tries.claimed, tries.successor):
            return True  # the others send it there, or it has computed the prompt and tokens of a stream that moves
        if tries.claim is None:
            tries.claim = self._claims.enter(forward.id, _tenant_of(forward))
        failed = tries.excluded | tries.unfit | tries.unreached
        agent = await self._claims.take(tries.claim, route.agent_id, failed)
        if not tries.has_asked and self.locate is not None:
            tries.has_asked = True
            if found := await self.locate(forward, {*failed, agent}):
                agent = await self._claims.take(tries.claim, found, {*failed, agent})
        if agent == route.agent_id:
            tries.waits_since = None
            return True
        view = next((one for one in self._router.table if one.agent_id == agent), None)
        if view is not None and view.may_start and tries.claimed != agent:
            tries.claimed, tries.waits_since = agent, None  # choose that one, if it is ready
            return False
        if tries.waits_since is None:
            tries.waits_since = self._clock()
        waited = self._clock() - tries.waits_since
        if view is None or not view.may_start or waited >= CLAIMED_S:
            tries.unreached.add(agent)
            tries.claimed, tries.waits_since = "", None
        else:
            await self._next_change(min(max(waited, FIRST_PAUSE_S), MOST_PAUSE_S))
        return False

    async def _ask_after(self, agent_id: str, route: Route, forward: Forward, tries: Tries) -> None:
        """Wait until an agent that has lost a stream has said whether it lives; or it does not answer, or has left.

        If only the engine has ended, it starts again there: no other agent loads the model, which takes longer.  If
        others have the model ready, and are full, the stream does not wait any longer than until one has room.
        """
        turn = self._join(route, forward)
        try:
            while self._registry.is_unsettled(agent_id):
                change = asyncio.ensure_future(self._next_change(MOST_PAUSE_S))
                waited = {change} if turn is None else {change, turn.come}
                try:
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
                if turn is not None and self._finds_room(turn, forward, tries):
                    return
        finally:
            if turn is not None:
                self._router.room.leave(turn)
        tries.awaited.add(agent_id)
        if self._registry.answer_of(agent_id) is not None:
            tries.excluded.discard(agent_id)

    def _join(self, route: Route, forward: Forward) -> Turn | None:
        """The request's turn for room at the agents that have its model, if the route is to a further copy."""
        return self._router.room.join(base_of(forward.routed.model)) if route.evict is None else None

    def _finds_room(self, turn: Turn, forward: Forward, tries: Tries) -> bool:
        """Whether there is room for a request in a line. Room that only others can use is passed on to them."""
        was_woken = turn.come.done()
        turn.reset()
        if self._router.has_room(tries.routed(forward)):
            return True
        # Without this check each request of a line would be woken for room that a new one has taken.
        if was_woken and self._router.has_room(RoutedRequest(request_id=forward.id, model=turn.model)):
            self._router.room.pass_on(turn)
        return False

    async def _load(self, route: Route, forward: Forward, tries: Tries, out: Out | None) -> None:
        """Wait until the model is loaded; a further copy, or until an agent that has the model has room again."""
        model = forward.routed.model
        turn = self._join(route, forward)
        agents, tenant = [route.agent_id], _tenant_of(forward)
        loaded = self._cold.wait(
            model,
            route.agent_id,
            route.evict,
            route.predicted_s,
            agents.append,
            tenant,
            is_admitted=tries.was_lost,
        )
        waiter = asyncio.ensure_future(loaded)
        cancelled = asyncio.get_running_loop().create_future()
        self._loading.setdefault(forward.id, set()).add(cancelled)
        begun = commented = self._clock()
        try:
            while True:
                waited = {waiter, cancelled} if turn is None else {waiter, cancelled, turn.come}
                done, _ = await asyncio.wait(waited, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
                if waiter.done() or cancelled.done():
                    break
                if turn is not None and self._finds_room(turn, forward, tries):
                    return
                if tries.was_lost and (returned := self._router.ready_of(tries.excluded, model)):
                    tries.excluded.difference_update(returned)
                    return
                if out is not None and (not done or self._clock() - commented >= COMMENT_S):
                    commented = self._clock()
                    await comment(out, f"loading {model}: {self._progress_of(model) or 'waiting'}")
            if cancelled.done():
                raise cancelled_by_client()
        finally:
            tries.waited_for_load(self._clock() - begun)
            waiter.cancel()
            self._loading[forward.id].discard(cancelled)
            if not self._loading[forward.id]:
                del self._loading[forward.id]
            if turn is not None:
                self._router.room.leave(turn)
        try:
            await waiter
            # What was loaded elsewhere, for others, is no sign that the route's agent has another version, too.
            tries.loaded(is_own=agents[-1] == route.agent_id)
        except StarlingError as error:
            # The load that was joined may be at another agent than the route's, which must not count as unfit.
            tries.not_loaded(forward, agents[-1], error, is_further=turn is not None)
            if not isinstance(error, NotRefused):  # which is logged where it is found
                log.warning("a model was not loaded", extra={"model": model, "agent": agents[-1], "reason": str(error)})


def _tenant_of(forward: Forward) -> str:
    """Whose request it is; "": it does not say."""
    return read_relay(forward.headers.get(RELAY, "1")).tenant


async def comment(out: Out, text: str) -> None:
    """A comment that clients skip; with the first one the response begins."""
    if not out.is_begun:
        out.begin(200, {})
    await out.write(sse.comment(text))
