"""Routing by score: of the agents that have the model ready, the one with the lowest estimate; else the one that would
be ready first.

    ready       the model runs there and the agent may get new requests
    suspect     the agent has not answered its last poll: only if no other one is ready
    held        only the agent that has the session or the answer can serve the request: even suspect, or cordoned
    cold        the model must be loaded first, for which another model may have to leave
    further     all agents that have it ready are full: an idle one loads it, too, if no other model has to leave

A published adapter is a model of its own, MODEL:ADAPTER, that runs in the engine of its model: it is loaded into that,
and waits in its queue.  Requests under way are counted here, because agents report their queues only now and then.
Without sockets and text.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from pipeline.api.adapter_names import adapter_of, base_of
from pipeline.catalog.adapters import unknown_adapter
from pipeline.errors import ModelNotFound, ModelUnavailable, Overloaded, StarlingError
from pipeline.fleet.bodies import LoadedModel
from stages.orchestrator import adapter_hosts, further_copies
from stages.orchestrator.adapter_hosts import Published
from stages.orchestrator.decisions import AgentScore, Choice, DecisionLog
from stages.orchestrator.eviction import Eviction
from stages.orchestrator.held_prefixes import HeldPrefixes, engine_name
from stages.orchestrator.interfaces import NodeView, RequestRouter, RoutedRequest, RoutingTable
from stages.orchestrator.model_places import ModelPlace, ModelPlaces
from stages.orchestrator.policies import Order, by_name, by_score
from stages.orchestrator.rates import Rates
from stages.orchestrator.score import Weights, loaded, names_in, residence, shared_files, terms
from stages.orchestrator.session_cost import Place, Size, terms_of

RETRY_AFTER_S = 1.0


class Route(NamedTuple):
    """Where a request goes."""

    agent_id: str
    url: str  # of the agent
    engine: LoadedModel | None  # None: the model must be loaded first
    predicted_s: float  # until the first token
    ahead: int
    new_bytes: int  # of the prompt, not cached there
    evict: str | None  # the model that must leave first; "": none; None: none may, because others have the model ready
    must_hold: bool = False  # the session must exist there: the engine begins none


class ScoreRouter(RequestRouter):
    """One per orchestrator. `wall`: s since 1970; `clock`: monotonic, s. `published`: a model's entry, or None."""

    def __init__(
        self,
        weights: Weights,
        max_per_agent: int,
        published: Callable[[str], Published | None],
        wall: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        order: Order = by_score,
        names: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`order`: of agents that have the model ready. `names`: what is published."""
        self.prefixes = HeldPrefixes(clock)
        self.rates = Rates()
        self.decisions = DecisionLog()
        self.weights = weights
        self._max_per_agent = max_per_agent
        self._published = published
        self._wall = wall
        self._order = order
        self._names = names
        self._table: dict[str, NodeView] = {}
        self._places = ModelPlaces()
        self._under_way: Counter[tuple[str, str]] = Counter()  # by agent and model, which has those of its adapters
        self._turns = itertools.count()
        self._last_turn: dict[str, int] = {}  # by agent: ties go to the one that was chosen longest ago
        self.eviction = Eviction(self._turns, self._under_way)
        self.room = further_copies.RoomLines()
        self.loading_at: Callable[[str], Collection[str]] = lambda model: ()  # agents that load it ("": any) now
        self.failed_at: Callable[[str], Collection[str]] = lambda model: ()  # agents that have just failed to

    # ---------------------------------------------------------------- the table

    def update_routing_table(self, table: RoutingTable) -> None:
        """Route by this table from now on. Forgets what was measured of agents that have left."""
        self._table = {view.agent_id: view for view in table}
        holders: dict[str, set[str]] = {}  # agents that give the pieces of a file, by its digest
        for view in table:
            if view.health == "READY":
                for digest in shared_files(view.details):
                    holders.setdefault(digest, set()).add(view.agent_id)
        self._places = ModelPlaces(holders)
        self.rates.keep_only(set(self._table))
        running = [(view, one) for view in table for one in view.details.loaded_models if one.engine_incarnation]
        self.prefixes.keep_only({engine_name(view.agent_id, one) for view, one in running})
        self._last_turn = {name: turn for name, turn in self._last_turn.items() if name in self._table}
        self.eviction.update(self._table)

    @property
    def table(self) -> list[NodeView]:
        """The agents, by id."""
        return list(self._table.values())

    def models(self) -> dict[str, list[str]]:
        """The agents on which each model is ready, by model."""
        found: dict[str, list[str]] = {}
        for view in self._table.values():
            for name in names_in(view.details):
                one = loaded(view.details, name)
                if one is not None and one.model_state == "READY":
                    found.setdefault(name, []).append(view.agent_id)
        return found

    def has(self, model: str) -> bool:
        """Whether an agent has the model loaded, or is loading it."""
        return any(loaded(view.details, model) is not None for view in self._table.values())

    def is_known(self, model: str) -> bool:
        """Whether the model is published, or an agent has it loaded or is loading it."""
        return self._published(model) is not None or self.has(model)

    def adapters_of(self, base: str) -> list[str]:
        """The adapters of a model that are published or loaded, as MODEL:ADAPTER."""
        known = [*self._names(), *(name for view in self._table.values() for name in names_in(view.details))]
        return sorted({name for name in known if base_of(name) == base and ":" in name})

    def resolve(self, name: str) -> str:
        """What a request asks for: `name`, or MODEL:NAME where no model has the name and one has such an adapter.

        Raises `ModelNotFound` if several have one.
        """
        if ":" in name or self.is_known(name) or self._is_cached(name):
            return name
        found = sorted(one for one in self._names() if adapter_of(one) == name)
        if len(found) > 1:
            listed = " and ".join(found[:8])
            raise ModelNotFound(f"adapter {name!r} belongs to several models; ask for one of {listed}", "model")
        return found[0] if found else name

    def _is_cached(self, model: str) -> bool:
        """Whether the model's files are on an agent."""
        return any(model in one.names for view in self._table.values() for one in view.details.cached_models)

    def has_other(self, model: str, agent_id: str) -> bool:
        """Whether another agent has the model ready and may get requests."""
        return any(
            view.agent_id != agent_id and view.may_start and _has_ready(view, model) for view in self._table.values()
        )

    def ready_of(self, agents: Collection[str], model: str) -> list[str]:
        """Those of the agents that answer and have the model ready."""
        return [name for name in agents if (view := self._table.get(name)) is not None and _has_ready(view, model)]

    # ---------------------------------------------------------------- choosing

    async def route_request(self, request: RoutedRequest) -> str:
        """The id of the agent that serves the request. Raises `ModelNotFound`, `ModelUnavailable`, `Overloaded`."""
        return self.choose(request).agent_id

    def has_room(self, request: RoutedRequest) -> bool:
        """Whether an agent that has the model ready can take the request now."""
        return any((one := self._score(request, view)).is_candidate and one.state == "READY" for view in self.table)

    def choose(self, request: RoutedRequest, cause: str = "new", *, may_copy: bool = False) -> Route:
        """Choose an agent, and record why. Raises `ModelNotFound`, `ModelUnavailable`, `Overloaded`."""
        if request.has_context:
            self._check_engine(request.model)
        scored = [self._score(request, view) for view in self._table.values()]
        ready = [one for one in scored if one.is_candidate and one.state == "READY"]
        candidates = [one for one in ready if self._table[one.agent_id].health == "READY"] or ready
        if len(candidates) > 1:
            candidates = [one for one in candidates if self._table[one.agent_id].may_start] or candidates
            published = self._published(request.model)
            candidates = adapter_hosts.of_published(candidates, self._table, request.model, published)
            if request.pinned:
                candidates = [one for one in candidates if one.agent_id == request.pinned] or candidates
        order = by_name(request.begins) if request.begins and not request.is_held else self._order
        further = self._further(request, scored) if may_copy and not candidates else []
        if not candidates:
            if not further:
                self._refuse(request, scored)
            if request.is_held and request.begins and not request.pinned:
                raise ModelUnavailable(f"no agent that has {request.model} ready has the session")
            candidates = further or [one for one in scored if one.is_candidate]
            # An engine that has just failed to start is tried again only if no other agent can load the model.
            candidates = [one for one in candidates if one.state != "FAILED"] or candidates
            begun = self.loading_at(base_of(request.model))
            hosts = {view.agent_id for view in self._table.values() if self.is_host(view, request.model)}
            candidates = adapter_hosts.nearest(candidates, request.model, hosts, begun)
            cause, order = "overloaded" if further else "cold", by_score
        best = candidates[0]
        if len(candidates) > 1:
            best = min(candidates, key=lambda one: order(one, self._last_turn))
        view = self._table[best.agent_id]
        rates = self.rates.of(best.agent_id, request.model)
        predicted_s = max(0.0, best.score_s + request.prompt_bytes * rates.prefill_s_per_byte.value)
        self.decisions.add(
            request.request_id,
            request.model,
            Choice(agent_id=best.agent_id, at=self._wall(), cause=cause, predicted_s=predicted_s, scores=tuple(scored)),
        )
        self._last_turn[best.agent_id] = next(self._turns)
        is_ready = best.state == "READY"
        return Route(
            agent_id=best.agent_id,
            url=view.url,
            engine=loaded(view.details, request.model) if is_ready else None,
            predicted_s=predicted_s,
            ahead=best.ahead,
            new_bytes=max(0, request.prompt_bytes - best.matched_bytes),
            evict=None
            if further
            else ""
            if is_ready or not self._takes_place(view, request.model)
            else self.room_for(view, request.model) or "",
            must_hold=request.is_held and bool(request.begins),
        )

    def _further(self, request: RoutedRequest, scored: list[AgentScore]) -> list[AgentScore]:
        """The agents that may load the model as well, if all that have it ready are full; the caller waits for that."""
        model = request.model
        if not further_copies.are_wanted(request, scored):
            return []
        busy = {agent_id for agent_id, _ in self._under_way}.union(self.loading_at(""), self.failed_at(model))
        fit = further_copies.places(scored, self._table, self.loading_at(model), busy)
        return [one for one in fit if self._has_place(self._table[one.agent_id], model)]

    def is_host(self, view: NodeView, model: str) -> bool:
        """Whether the agent has an engine for the model, or is getting one: for an adapter in the right version."""
        return adapter_hosts.is_host(view.details, model, self._published(model))

    def room_for(self, view: NodeView, model: str) -> str | None:
        """The model that leaves the agent for another one: "" if there is room, None if none may leave."""
        return self.eviction.room_for(view, model, self._published(model))

    def _takes_place(self, view: NodeView, model: str) -> bool:
        """Whether an engine must be started for a model: an adapter is loaded into that of its model."""
        return not self.is_host(view, model) and view.agent_id not in self.loading_at(base_of(model))

    def _has_place(self, view: NodeView, model: str) -> bool:
        """Whether no other model must leave for this one; an adapter needs an engine of its model."""
        return not self._takes_place(view, model) or (":" not in model and self.room_for(view, model) == "")

    def _check_engine(self, model: str) -> None:
        """Raises `StarlingError` if another kind of engine computes the model, which takes no conversations."""
        for view in self._table.values():
            running = loaded(view.details, model)
            if running is not None and running.continues_text:
                raise StarlingError(
                    "NOT_IMPLEMENTED",
                    f"{model} is computed by {running.engine}, which does not serve /v1/responses; use "
                    "/v1/chat/completions, or another model",
                    "model",
                )

    def _score(self, request: RoutedRequest, view: NodeView) -> AgentScore:
        model = request.model
        place = self._places.find(view, model, self._published(model))
        ahead = self._ahead(view.agent_id, place.queue)
        matched = 0
        if request.blocks and place.running is not None:
            matched = self.prefixes.matched_bytes(place.engine, request.blocks)
        rates = self.rates.of(view.agent_id, model)
        prompt = min(matched, request.prompt_bytes)
        found = terms(view.details, place.where, rates, ahead=ahead, matched_bytes=prompt)
        is_ready = _answers(request, view, place.running)
        reason = self._objection(request, view, place, is_ready)
        return AgentScore(
            agent_id=view.agent_id,
            score_s=found.total(self.weights),
            terms=found,
            level=place.where.level,
            ahead=ahead,
            matched_bytes=matched,
            state="READY" if is_ready else place.running.model_state if place.running is not None else "",
            is_candidate=not reason,
            reason=reason,
        )

    def _objection(self, request: RoutedRequest, view: NodeView, place: ModelPlace, is_ready: bool) -> str:
        """Why the agent is no candidate; "" if it is one. `is_ready`: its engine answers the request."""
        if view.agent_id in request.excluded:
            return "it has just failed this request"
        if request.is_held and request.pinned not in ("", view.agent_id):
            return f"agent {request.pinned} holds its session or answer"
        if not view.may_start and not (request.is_held and is_ready):
            return view.reason
        is_other = bool(request.version) and not (is_ready and request.version in place.versions)
        if is_other and (is_ready or not self._may_become(request, view)):
            return "it does not serve the version that began the answer"
        if request.has_context and is_ready and place.running is not None and not place.running.takes_conversations:
            return "its engine takes no conversations of /v1/responses"
        if is_ready:
            is_full = self._under_way[view.agent_id, base_of(request.model)] >= self._max_per_agent
            return f"{self._max_per_agent} requests are under way there" if is_full else ""
        if view.health != "READY":
            return "it does not answer"
        if ":" in request.model and not view.details.serves_adapters:
            return "its release loads no adapters"
        if not self._takes_place(view, request.model):
            return ""
        if view.details.files_silent_s:
            return f"its disk has not answered for {view.details.files_silent_s:.0f} s"
        published = self._published(request.model)
        if published is None and residence(view.details, request.model, "", 0).level == "REMOTE":
            return "it does not have the model, which is not published"
        if self.room_for(view, request.model) is None:
            if adapter_hosts.has_other_version(view.details, request.model, published):
                return f"it has another version of {base_of(request.model)}, which is not idle"
            return f"it runs {view.details.max_models} models, and none of them is idle without being placed"
        return ""

    def _may_become(self, request: RoutedRequest, view: NodeView) -> bool:
        published = self._published(request.model)
        return adapter_hosts.may_become(view.details, request.model, request.version, published)

    def _refuse(self, request: RoutedRequest, scored: list[AgentScore]) -> None:
        """No agent has the model ready. Raises unless one of them can load it."""
        model = request.model
        if full := further_copies.full(scored):
            raise Overloaded(
                f"all {len(full)} agents that serve {model} have {self._max_per_agent} requests under way "
                "(fleet.orchestrator.max_per_agent); try again",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._published(model) is None and not self._is_cached(model):
            known = any(loaded(view.details, model) for view in self._table.values())
            if not known:
                self._refuse_adapter(model)
                raise ModelNotFound(f"there is no model {model[:200]!r}; GET /v1/models lists them", "model")
        if not any(one.is_candidate for one in scored):
            reasons = "; ".join(f"{one.agent_id}: {one.reason}" for one in scored[:8]) or "no agent has registered"
            if request.is_held and request.pinned and request.pinned not in self._table:
                reasons = f"agent {request.pinned}, which holds its session or answer, has left"
            raise ModelUnavailable(f"no agent can serve {model} now ({reasons})", retry_after_s=RETRY_AFTER_S)

    def _refuse_adapter(self, model: str) -> None:
        """Raises the error of an adapter that is not published, if its model is known."""
        base, colon, adapter = model.partition(":")
        if not colon:
            return
        others = [loaded(view.details, base) for view in self._table.values()]
        other = next((one.engine for one in others if one is not None and one.engine != "starling"), "")
        if other:
            raise StarlingError(
                "NOT_IMPLEMENTED",
                f"{model[:200]!r} names the adapter {adapter[:80]!r}, and {base!r} is computed by {other}, for which "
                f"no adapters are published: send {base!r} for the model without it",
                "model",
            )
        if self._published(base) is not None or self.has(base):
            raise unknown_adapter(base, adapter, self.adapters_of(base))

    def _ahead(self, agent_id: str, running: LoadedModel | None) -> int:
        """Sequences before a new request: what the agent reported, or what was sent to it since, if that is more."""
        if running is None:
            return 0
        return max(running.running + running.vllm_queue_length, self._under_way[agent_id, base_of(running.model_id)])

    def place(self, agent_id: str, model: str, bytes_per_s: float = 0.0) -> Place:
        """An agent as it could serve a session's turn. `bytes_per_s`: of KV pages that are sent to it."""
        view, rates = self._table.get(agent_id), self.rates.of(agent_id, model)
        ahead = self._ahead(agent_id, loaded(view.details, model) if view is not None else None)
        return Place(agent_id, ahead * rates.turn_s.value, rates.prefill_s_per_byte.value, bytes_per_s)

    def note_turn(
        self, request_id: str, model: str, agent_id: str, home: Place, others: list[Place], size: Size
    ) -> None:
        """Record why a session's turn is served by an agent."""
        scores = []
        for one in (home, *others):
            terms = terms_of(one, size, is_home=one is home)
            state = "has the session" if one is home else ""
            scores.append(
                AgentScore(
                    agent_id=one.agent_id,
                    score_s=terms.total(self.weights),
                    terms=terms,
                    level="",
                    ahead=0,
                    matched_bytes=size.text_bytes if one is home else 0,
                    state=state,
                )
            )
        predicted_s = next((one.score_s for one in scores if one.agent_id == agent_id), 0.0)
        choice = Choice(
            agent_id=agent_id, at=self._wall(), cause="session", predicted_s=predicted_s, scores=tuple(scores)
        )
        self.decisions.add(request_id, model, choice)

    # ---------------------------------------------------------------- what happens to requests

    def begin(self, route: Route, request: RoutedRequest) -> None:
        """The request is sent to the agent."""
        base = base_of(request.model)
        self._under_way[route.agent_id, base] += 1
        self.eviction.uses.begin(route.agent_id, *{base, request.model})
        if request.blocks and route.engine is not None and route.agent_id in self._table:
            self.prefixes.remember(engine_name(route.agent_id, route.engine), request.blocks)

    def first_token(self, route: Route, request: RoutedRequest, seconds: float) -> None:
        """Its first byte came after `seconds`."""
        # While weights arrive it contains the wait for them, and after a move the whole session: no speed.
        if not request.has_moved and (route.engine is None or route.engine.progress is None):
            self.rates.observe(
                route.agent_id,
                request.model,
                new_bytes=route.new_bytes,
                ahead=route.ahead,
                first_token_s=seconds,
                predicted_s=route.predicted_s,
            )
        decision = self.decisions.find(request.request_id)
        if decision is not None and not decision.first_token_s:
            decision.first_token_s = seconds

    def name_pages(self, request: RoutedRequest, header: str) -> None:
        """An engine's answer names the pages of its prompt."""
        self.prefixes.learn(request.blocks, request.prompt_bytes, header)

    def end(self, route: Route, request: RoutedRequest) -> None:
        """It has ended there, or was moved."""
        key = (route.agent_id, base_of(request.model))
        self._under_way[key] -= 1
        if self._under_way[key] <= 0:
            del self._under_way[key]
        self.room.wake(key[1])
        self.eviction.uses.end(route.agent_id, request.model)

    def under_way(self, agent_id: str, model: str = "") -> int:
        """Requests of this orchestrator at an agent, of a model or of all."""
        base = base_of(model)
        return sum(n for (name, one), n in self._under_way.items() if name == agent_id and base in ("", one))


def _has_ready(view: NodeView, model: str) -> bool:
    """Whether the agent answers and has the model ready."""
    running = loaded(view.details, model) if view.health == "READY" else None
    return running is not None and running.model_state == "READY"


def _answers(request: RoutedRequest, view: NodeView, running: LoadedModel | None) -> bool:
    """Whether the agent's engine answers the request: also one whose model was withdrawn, for what it holds."""
    if running is None:
        return False
    is_holder = request.is_held and request.pinned == view.agent_id
    return running.model_state == "READY" or (is_holder and bool(running.engine_url))
