"""Routing: the lowest estimate among those that may serve, and the reason for every choice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ModelNotFound, ModelUnavailable, Overloaded, StarlingError
from pipeline.fleet.bodies import Progress
from stages.orchestrator.decisions import Choice, DecisionLog
from stages.orchestrator.forward import Bounds, Forward, Refusal, Tries
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.policies import order_of
from stages.orchestrator.prefixes import BLOCK_BYTES, block_hashes
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.score import version_of
from tests.orchestrator.agents import DIGEST, MODEL, cached, engine, request, router, view

VIEWS = st.lists(
    st.tuples(
        st.sampled_from(["READY", "DOWNLOADING", "FAILED", ""]),  # of the model there; "": not loaded
        st.integers(0, 50),  # queue
        st.booleans(),  # may start
        st.sampled_from(["READY", "SUSPECT"]),
        st.booleans(),  # excluded
    ),
    min_size=1,
    max_size=6,
)


def build(rows: list[tuple[str, int, bool, str, bool]]) -> tuple[list[NodeView], frozenset[str]]:
    views, excluded = [], set()
    for number, (state, queue, may_start, health, is_excluded) in enumerate(rows):
        engines = [engine(model_state=state, vllm_queue_length=queue)] if state else []
        views.append(view(f"a{number}", *engines, may_start=may_start, health=health))
        if is_excluded:
            excluded.add(f"a{number}")
    return views, frozenset(excluded)


@given(VIEWS)
def test_the_choice_is_the_best_of_the_nearest_kind(rows: list[tuple[str, int, bool, str, bool]]) -> None:
    views, excluded = build(rows)
    routing = router(*views)
    usable = [one for one in views if one.may_start and one.agent_id not in excluded]
    ready = [one for one in usable if any(m.model_state == "READY" for m in one.details.loaded_models)]
    ready = [one for one in ready if one.health == "READY"] or ready
    cold = [one for one in usable if one.health == "READY"]
    if not ready and not cold:
        with pytest.raises(ModelUnavailable) as refused:
            routing.choose(request(excluded=excluded))
        assert all(f"{one.agent_id}: " in refused.value.message for one in views)
        return
    route = routing.choose(request(excluded=excluded))
    assert route.agent_id in {one.agent_id for one in ready or cold}
    assert (route.engine is not None) == bool(ready)
    decision = routing.decisions.find("req-1")
    assert decision is not None
    (choice,) = decision.choices
    assert choice.agent_id == route.agent_id
    assert {one.agent_id for one in choice.scores} == {one.agent_id for one in views}
    assert all(bool(one.reason) != one.is_candidate for one in choice.scores)
    if ready:
        scores = {one.agent_id: one.score_s for one in choice.scores}
        assert scores[route.agent_id] <= min(scores[one.agent_id] for one in ready) + 0.001


def test_equal_agents_take_turns() -> None:
    routing = router(*(view(name, engine()) for name in "abc"))
    assert [routing.choose(request()).agent_id for _ in range(6)] == list("abcabc")


def test_requests_under_way_count_until_they_end() -> None:
    routing = router(view("a", engine()), view("b", engine()))
    route = routing.choose(request())
    routing.begin(route, request())
    assert [routing.choose(request()).agent_id for _ in range(3)] == ["b"] * 3
    routing.end(route, request())
    assert routing.under_way("a") == 0
    assert {routing.choose(request()).agent_id for _ in range(2)} == {"a", "b"}


def test_a_prompt_goes_where_its_prefix_is_unless_the_queue_is_longer() -> None:
    routing = router(view("a", engine()), view("b", engine()))
    blocks = block_hashes(b"x" * 40 * BLOCK_BYTES)
    asked = request(blocks=blocks, prompt_bytes=40 * BLOCK_BYTES)
    first = routing.choose(asked)
    routing.begin(first, asked)
    routing.end(first, asked)
    again = routing.choose(asked)
    assert again.agent_id == first.agent_id and again.new_bytes == 0
    busy = engine(vllm_queue_length=1000)
    routing.update_routing_table([view(n, busy if n == first.agent_id else engine()) for n in ("a", "b")])
    assert routing.choose(asked).agent_id != first.agent_id
    # An engine that has started anew has an empty cache.
    routing.update_routing_table([view(n, engine(engine_incarnation="2")) for n in ("a", "b")])
    assert routing.choose(asked).new_bytes == asked.prompt_bytes


def test_a_session_stays_with_its_agent() -> None:
    routing = router(view("a", engine()), view("b", engine(vllm_queue_length=1000)))
    assert routing.choose(request(pinned="b")).agent_id == "b"
    assert routing.choose(request(pinned="gone")).agent_id == "a"


def test_what_an_agent_holds_is_served_there_though_it_is_cordoned() -> None:
    cordoned = view("a", engine(vllm_queue_length=1000), may_start=False)
    routing = router(cordoned, view("b", engine()))
    assert routing.choose(request(pinned="a", is_held=True)).agent_id == "a"
    assert routing.choose(request(pinned="a")).agent_id == "b"
    # Nor does it go elsewhere because the agent has not answered a poll.
    routing.update_routing_table([view("a", engine(), health="SUSPECT", may_start=False), view("b", engine())])
    assert routing.choose(request(pinned="a", is_held=True)).agent_id == "a"
    # An engine whose model was withdrawn answers for what it has begun, and gets nothing else.
    withdrawn = engine(model_state="DOWNLOADING", engine_url="http://a")
    routing.update_routing_table([view("a", withdrawn), view("b", engine())])
    found = routing.choose(request(pinned="a", is_held=True))
    assert found.agent_id == "a" and found.engine == withdrawn
    assert routing.choose(request(pinned="a")).agent_id == "b"
    # It is not loaded on a cordoned agent, and waits for one that has left.
    for views, reason in (
        ([view("a", may_start=False), view("b", engine())], "a: cordoned"),
        ([view("b")], "has left"),
    ):
        routing.update_routing_table(views)
        with pytest.raises(ModelUnavailable, match=reason):
            routing.choose(request(pinned="a", is_held=True))


def test_a_session_that_may_begin_waits_for_the_agent_that_had_it() -> None:
    """Which has restarted, or has unloaded its model: it is loaded there, and nowhere else."""
    asked = request(is_held=True, begins="s", pinned="a")
    for views in ([view("a"), view("b", engine())], [view("a", engine("other")), view("b", engine())]):
        found = router(*views).choose(asked)
        assert (found.agent_id, found.engine, found.must_hold) == ("a", None, True)
    with pytest.raises(ModelUnavailable, match="has left"):
        router(view("b", engine())).choose(asked)
    for pinned, begins in (("a", False), ("", True)):
        asked = request(is_held=True, begins="s", pinned=pinned)
        assert Tries(lambda: 0.0).begin_session(asked) is begins


def test_agents_that_were_not_asked_may_have_the_session() -> None:
    """One that has too many requests, or has not answered its first poll."""
    routing = router(view("a", engine()), view("b", engine()), max_per_agent=1)
    routed = request(is_held=True)
    forward = Forward(routed=routed, path="", body=b"", headers={}, is_bound=True)
    full = routing.choose(request(pinned="a"))
    routing.begin(full, request())
    tries = Tries(lambda: 0.0)
    assert routing.choose(tries.routed(forward)).agent_id == "b"
    lacks = Refusal(404, {}, b"")
    tries.failed("b", lacks)
    tries.lacks_session("b", lacks)
    with pytest.raises(Overloaded) as refused:
        routing.choose(tries.routed(forward))
    with pytest.raises(Overloaded, match="max_per_agent"):
        tries.give_up(refused.value, forward, Bounds())
    routing.end(full, request())
    routing.update_routing_table([view("b", engine())])
    with pytest.raises(ModelUnavailable) as unavailable:
        routing.choose(tries.routed(forward))
    tries.give_up(unavailable.value, forward, Bounds(), may_be_there=True)
    with pytest.raises(Refusal, match="404"):
        tries.give_up(unavailable.value, forward, Bounds())


def test_a_session_is_looked_for_on_every_agent_the_cordoned_ones_last() -> None:
    views = [
        view("a", engine(), may_start=False),
        view("b", engine(), health="SUSPECT"),
        view("c", engine(vllm_queue_length=1000)),
    ]
    routing, found = router(*views), list[str]()
    for _ in views:
        found.append(routing.choose(request(is_held=True, excluded=frozenset(found))).agent_id)
    assert found == ["c", "a", "b"]


@given(st.integers(0, 50), st.integers(0, 50), st.text(min_size=1, max_size=20))
def test_a_named_session_begins_at_the_same_agent_for_every_orchestrator(first: int, second: int, name: str) -> None:
    """Whatever their queues are: two orchestrators, or two requests at once, must not begin it twice."""
    chosen = {
        router(view("a", engine(vllm_queue_length=one)), view("b", engine()), view("c", engine(running=two)))
        .choose(request(begins=name))
        .agent_id
        for one, two in ((first, second), (second, first), (0, 0))
    }
    assert len(chosen) == 1


def test_named_sessions_spread_over_the_agents() -> None:
    routing = router(*(view(name, engine()) for name in "abc"))
    chosen = [routing.choose(request(begins=f"session {number}")).agent_id for number in range(300)]
    assert all(60 < chosen.count(name) < 140 for name in "abc")


def test_a_stream_continues_on_its_version_only() -> None:
    views = [view("a", engine(digest="f" * 64)), view("b", engine(vllm_queue_length=1000))]
    routing = router(*views, view("c"))
    assert routing.choose(request(version=version_of(engine()))).agent_id == "b"
    other = request(version=version_of(engine(kv_type="f32")))
    with pytest.raises(ModelUnavailable, match="version that began"):
        router(*views).choose(other)
    # Of an agent that must load it first its files are known, and the arithmetic of its other engines.
    assert routing.choose(other).agent_id == "c"
    routing.update_routing_table([view("c", engine("other", numerics=2)), view("d", engine("other"))])
    assert routing.choose(other).agent_id == "d"


def test_a_stream_goes_on_where_its_model_must_be_loaded_first() -> None:
    began = version_of(engine())
    route = router(view("a")).choose(request(version=began))
    assert (route.agent_id, route.engine) == ("a", None)
    routing = router(view("a"), view("b", engine(model_state="LOADING_TO_GPU")))  # which starts again
    assert routing.choose(request(version=began)).agent_id == "b"
    for other in (version_of(engine(digest="f" * 64)), f"vllm:{DIGEST}"):
        with pytest.raises(ModelUnavailable, match="version that began"):
            routing.choose(request(version=other))
    # What is not published is loaded where the same file is.
    mine = [cached(names=("mine",), digest=digest * 64) for digest in "fd"]
    routing = router(*(view(name, cached_models=(one,)) for name, one in zip("ab", mine)))
    assert routing.choose(request(model="mine", version=began)).agent_id == "b"
    # A file of another engine has a digest when that runs.
    own = cached(names=("mine",), digest="vllm:mine", engine="vllm")
    routing = router(view("a"), view("b", cached_models=(own,)))
    assert routing.choose(request(model="mine", version=f"vllm:{DIGEST}")).agent_id == "b"


def test_a_full_fleet_refuses_with_the_bound() -> None:
    routing = router(view("a", engine()), max_per_agent=1)
    routing.begin(routing.choose(request()), request())
    with pytest.raises(Overloaded, match="max_per_agent"):
        routing.choose(request())


def full(*others: NodeView) -> ScoreRouter:
    """The agent "full" has the model and all the requests that it may have."""
    routing = router(view("full", engine()), *others, max_per_agent=1)
    routing.begin(routing.choose(request(pinned="full")), request())
    return routing


IDLE = {"cached_models": (cached(),)}


def test_a_model_whose_agents_are_full_is_loaded_on_an_idle_one() -> None:
    """The one with the lowest score; nothing leaves for it, and only who waits for the load gets such a route."""
    routing = full(view("far"), view("near", engine("other"), **IDLE), view("busy", engine("other", running=1), **IDLE))
    route = routing.choose(request("req-2"), may_copy=True)
    assert (route.agent_id, route.engine, route.evict) == ("near", None, None)
    decision = routing.decisions.find("req-2")
    assert decision is not None and [one.cause for one in decision.choices] == ["overloaded"]
    with pytest.raises(Overloaded, match="all 1 agents that serve demo"):
        routing.choose(request())
    # For a stream that has begun, a copy of its version.
    assert routing.choose(request(version=version_of(engine())), may_copy=True).agent_id == "near"


@pytest.mark.parametrize(
    "other",
    [
        view("b", engine("other", running=1), **IDLE),
        view("b", engine("other", vllm_queue_length=1), **IDLE),
        view("b", engine("other", model_state="LOADING_TO_GPU"), **IDLE),
        view("b", engine(model_state="FAILED"), **IDLE),
        view("b", engine("other"), max_models=1, **IDLE),  # which would have to leave
        view("b", may_start=False, **IDLE),
        view("b", health="SUSPECT", **IDLE),
        view("b", state="DEGRADED", **IDLE),
        view("b", memory_available=0.07, **IDLE),
        view("b", vllm_queue_length=1, **IDLE),
    ],
)
def test_no_further_copy_is_loaded_where_anything_is_done_or_would_have_to_leave(other: NodeView) -> None:
    with pytest.raises(Overloaded, match="max_per_agent"):
        full(other).choose(request("req-2"), may_copy=True)


def test_agents_with_other_work_of_this_orchestrator_are_not_idle() -> None:
    def choose() -> str:
        return routing.choose(request("req-2"), may_copy=True).agent_id

    routing = full(view("b", engine("other"), **IDLE))
    other = request(model="other")
    route = routing.choose(other)
    routing.begin(route, other)  # not in a report yet
    with pytest.raises(Overloaded):
        choose()
    routing.end(route, other)
    assert choose() == "b"
    routing.loading_at = lambda model: {"b"} if model in ("", "third") else ()
    with pytest.raises(Overloaded):
        choose()
    routing.loading_at = lambda model: {"b"} if model in ("", MODEL) else ()  # all wait for one load
    assert choose() == "b"
    routing.loading_at = lambda model: ()
    routing.failed_at = lambda model: {"b"} if model == MODEL else ()
    with pytest.raises(Overloaded):
        choose()


def test_a_copy_that_is_loading_already_is_waited_for() -> None:
    """By any orchestrator, also on an agent that is not idle: no second load begins on an idle one."""
    loading = view("a", engine(model_state="DOWNLOADING"), engine("other", running=1), state="LOADING_MODEL")
    assert full(loading, view("b", **IDLE)).choose(request("req-2"), may_copy=True).agent_id == "a"


@pytest.mark.parametrize("fields", [{"pinned": "full"}, {"is_held": True}, {"begins": "s"}])
def test_what_belongs_to_an_agent_waits_for_no_copy(fields: dict[str, Any]) -> None:
    routing = full(view("b", **IDLE))
    with pytest.raises(Overloaded):
        routing.choose(request("req-2", **fields), may_copy=True)


def test_no_copy_is_loaded_for_a_conversation_that_a_copy_has_not_taken() -> None:
    """Of agents of an older release, each would load one, and serve nothing."""
    asked = request("req-2", has_context=True)
    for idle, is_wanted in ((view("b", engine()), False), (view("b", engine("other")), True)):
        routing = router(view("a", engine(takes_conversations=True)), idle, view("c", **IDLE), max_per_agent=1)
        routing.begin(routing.choose(asked), asked)
        if is_wanted:
            assert routing.choose(asked, may_copy=True).agent_id == "c"
        else:
            with pytest.raises(Overloaded):
                routing.choose(asked, may_copy=True)


def test_an_agent_with_room_comes_before_a_further_copy() -> None:
    routing = full(view("b", engine(vllm_queue_length=1000)), view("c", **IDLE))
    assert routing.choose(request("req-2"), may_copy=True).agent_id == "b" and routing.has_room(request())
    assert not full(view("c", **IDLE)).has_room(request())


def test_unknown_models_and_an_empty_fleet() -> None:
    with pytest.raises(ModelNotFound):
        router(view("a", engine())).choose(request(model="missing"))
    with pytest.raises(ModelUnavailable, match="no agent has registered"):
        router().choose(request())


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([], ""),
        ([engine("other")], "other"),
        ([engine("other", running=1)], None),
        ([engine("other", model_state="FAILED")], ""),
    ],
)
def test_an_idle_model_leaves_for_a_cold_one(engines: list[Any], expected: str | None) -> None:
    routing = router(view("a", *engines, max_models=1))
    if expected is None:
        with pytest.raises(ModelUnavailable, match="none of them is idle"):
            routing.choose(request())
    else:
        route = routing.choose(request())
        assert (route.engine, route.evict) == (None, expected)


def test_a_cold_model_goes_where_its_bytes_are() -> None:
    routing = router(view("a"), view("b", cached_models=(cached(),)), view("c", engine(model_state="FAILED")))
    assert routing.choose(request()).agent_id == "b"
    # An engine that failed is the last resort.
    assert routing.choose(request(excluded=frozenset("ab"))).agent_id == "c"


def test_a_cold_model_is_waited_for_where_any_orchestrator_loads_it() -> None:
    """Also where another agent would have it first."""
    files = {"cached_models": (cached(),)}
    for state in ("DOWNLOADING", "LOADING_TO_GPU"):
        loading = view("b", engine(model_state=state), engine("other", running=9), **files)
        assert router(view("a", **files), loading).choose(request()).agent_id == "b"
    loading = view("b", engine(model_state="DOWNLOADING"), health="SUSPECT")
    assert router(view("a", **files), loading).choose(request()).agent_id == "a"


def test_the_level_of_a_model_on_another_agent_is_recorded() -> None:
    holder = view("b", cached_models=(cached(),), shares_pieces=True, state="DEGRADED")
    silent = view("b", cached_models=(cached(),), shares_pieces=True, health="SUSPECT")
    for other, expected in ((holder, "PEER_CACHED"), (silent, "REMOTE")):
        routing = router(view("a", shares_pieces=True), other)
        routing.choose(request())
        (choice,) = routing.decisions.find("req-1").choices  # type: ignore[union-attr]
        assert {one.agent_id: one.level for one in choice.scores}["a"] == expected


def test_the_wait_for_weights_is_no_speed_of_an_engine() -> None:
    arriving = engine(cache_level="REMOTE", progress=Progress(phase="download", done=1, total=2))
    routing = router(view("a", arriving))
    asked = request(prompt_bytes=1000)
    before = routing.rates.of("a", MODEL).prefill_s_per_byte.value
    routing.first_token(routing.choose(asked), asked, 25.0)
    assert routing.rates.of("a", MODEL).prefill_s_per_byte.value == before
    decision = routing.decisions.find(asked.request_id)
    assert decision is not None and decision.first_token_s == 25.0
    routing.update_routing_table([view("a", engine())])
    routing.first_token(routing.choose(asked), asked, 25.0)
    assert routing.rates.of("a", MODEL).prefill_s_per_byte.value != before


def test_the_first_turn_after_a_sessions_move_is_no_speed_of_an_engine() -> None:
    """It may compute the whole session, of which its prompt is the new message alone."""
    routing = router(view("a", engine()))
    for has_moved in (True, False):
        asked = request(prompt_bytes=1000, has_moved=has_moved)
        before = routing.rates.of("a", MODEL).prefill_s_per_byte.value
        routing.first_token(routing.choose(asked), asked, 25.0)
        assert (routing.rates.of("a", MODEL).prefill_s_per_byte.value == before) == has_moved


def test_another_agent_is_one_that_is_ready_and_open() -> None:
    routing = router(view("a", engine()), view("b", engine(), may_start=False), view("c", engine("other")))
    assert not routing.has_other(MODEL, "a") and routing.has_other(MODEL, "b")


def test_a_model_that_is_not_published_is_loaded_where_it_is() -> None:
    routing = router(view("a"), view("b", cached_models=(cached(names=("private",)),)))
    assert routing.choose(request(model="private")).agent_id == "b"


def test_decisions_are_bounded() -> None:
    log = DecisionLog(3)
    for number in range(10):
        for _ in range(40):
            log.add(f"req-{number}", MODEL, Choice(agent_id="a", at=0.0, cause="new", predicted_s=0.0, scores=()))
    assert len(log) == 3 and log.find("req-6") is None
    assert [one.request_id for one in log.last(2)] == ["req-9", "req-8"]
    assert len(log.last(1)[0].choices) == 17


def test_other_policies_do_not_see_estimates() -> None:
    """a1 has the prompt; a0 and a1 have the same queue, a2 a longer one, and a3 must load the model."""
    text = b"x" * 4 * BLOCK_BYTES
    asked = request(blocks=block_hashes(text, ""), prompt_bytes=len(text))
    views = [view("a0", engine()), view("a1", engine()), view("a2", engine(vllm_queue_length=3)), view("a3")]
    draws = iter([0.9, 0.5, 0.1, 0.1, 0.5, 0.9])
    policies = {
        "score": order_of("score"),
        "least-queue": order_of("least-queue"),
        "round-robin": order_of("round-robin"),
        "random": order_of("random", lambda: next(draws)),
    }
    found = {}
    for name, order in policies.items():
        routing = router(*views, order=order)
        held = request("held", blocks=asked.blocks, prompt_bytes=len(text), pinned="a1")
        route = routing.choose(held) if name != "random" else router(*views).choose(held)
        routing.begin(route, held)
        routing.end(route, held)
        found[name] = [routing.choose(asked).agent_id for _ in range(2 if name == "random" else 4)]
    assert found == {
        "score": ["a1"] * 4,
        "least-queue": ["a0", "a1", "a0", "a1"],
        "round-robin": ["a0", "a2", "a1", "a0"],
        "random": ["a2", "a0"],
    }


def test_a_model_that_must_be_loaded_is_routed_by_the_score() -> None:
    routing = router(view("a0"), view("a1", cached_models=[cached()]), order=order_of("round-robin"))
    assert routing.choose(request()).agent_id == "a1"


def test_a_conversation_goes_to_an_engine_that_takes_it() -> None:
    found = router(view("old", engine()), view("new", engine(takes_conversations=True)))
    route = found.choose(request(has_context=True))
    assert route.agent_id == "new"
    assert "takes no conversations" in str(found.decisions.find("req-1"))
    with pytest.raises(ModelUnavailable, match="takes no conversations"):
        router(view("old", engine(), max_models=1)).choose(request(has_context=True))
    with pytest.raises(StarlingError, match="llama-server, which does not serve /v1/responses") as refused:
        router(view("a", engine(engine="llama-server", continues_text=True))).choose(request(has_context=True))
    assert refused.value.code == "NOT_IMPLEMENTED"
