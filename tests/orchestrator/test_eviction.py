"""Which models leave an agent, and which stay: as many copies of a placed one as it has replicas."""

from __future__ import annotations

import pytest

from pipeline.errors import ModelUnavailable
from pipeline.fleet.bodies import LoadedAdapter
from stages.orchestrator.idle_models import IdleModels, Loaded
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.placement import Load, copies_that_stay, missing_loads
from stages.orchestrator.router import Published, ScoreRouter
from tests.orchestrator.agents import DIGEST, MODEL, engine, request, router, view

ADAPTER = f"{MODEL}:first"


def with_adapter(*, is_ready: bool = True) -> NodeView:
    adapter = LoadedAdapter(name="first", digest="1" * 64, bytes=1, is_ready=is_ready)
    return view("a", engine(adapters=(adapter,)), engine("other"), serves_adapters=True)


def placed(*views: NodeView, **replicas: int) -> ScoreRouter:
    """A router that knows those placements."""
    made = router(*views)
    made.eviction.placements = lambda: replicas.items()
    return made


def test_a_placed_model_leaves_for_no_other() -> None:
    full = view("a", engine("other"), max_models=1)
    assert router(full).choose(request()).evict == "other"
    with pytest.raises(ModelUnavailable, match="none of them is idle without being placed"):
        placed(full, other=1).choose(request())
    # Nor at a refusal for memory.
    assert placed(full, other=1).eviction.idle_model("a", ()) == ""
    assert placed(full, demo=1).eviction.idle_model("a", ()) == "other"


def test_copies_beyond_the_replicas_leave() -> None:
    made = placed(view("a", engine("other"), max_models=1), view("b", engine("other"), max_models=1), other=1)
    route = made.choose(request())
    assert (route.agent_id, route.evict) == ("b", "other")
    now = [0.0]
    idle = IdleModels(lambda: now[0], made.under_way)
    for now[0] in (0.0, 60.0):
        idle.observe(made.table)
    assert idle.due(made.table, 60.0, made.eviction.stays) == [Loaded("b", "other")]


@pytest.mark.parametrize(
    ("views", "stays"),
    [
        ([view("a", engine()), view("b", engine())], ["a"]),
        ([view("a", engine(model_state="LOADING_TO_GPU")), view("b", engine())], ["b"]),
        ([view("a", engine(model_state="LOADING_TO_GPU")), view("b")], ["a"]),
        ([view("a", engine(), may_start=False), view("b", engine())], ["b"]),
        ([view("a", engine(), health="SUSPECT"), view("b", engine())], ["b"]),
        ([view("a", engine(), health="SUSPECT"), view("b", engine(model_state="DOWNLOADING"))], ["a"]),
        ([view("a", engine(model_state="FAILED")), view("b", engine("other"))], []),
    ],
)
def test_the_copies_that_serve_stay(views: list[NodeView], stays: list[str]) -> None:
    assert copies_that_stay([(MODEL, 1)], views) == {name: {MODEL} for name in stays}


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_model_of_a_placed_adapter_stays_with_it(*, is_ready: bool) -> None:
    made = placed(with_adapter(is_ready=is_ready), **{ADAPTER: 1})
    assert made.eviction.stays("a") == {ADAPTER, MODEL}
    assert made.eviction.idle_model("a", ()) == "other"
    assert not made.eviction.may_adapter_leave("a", f"{MODEL}:second")
    assert made.eviction.idle_adapter("a", f"{MODEL}:second", ()) == ""


def test_what_a_load_at_the_agent_brings_stays() -> None:
    made = router(with_adapter())
    made.eviction.loads_at = lambda agent_id: {ADAPTER} if agent_id == "a" else ()
    assert made.eviction.stays("a") == {ADAPTER, MODEL} and made.eviction.stays("b") == set()


def test_another_version_of_a_placed_model_leaves_for_its_adapter() -> None:
    """It comes back at once, as the adapter needs it."""
    made = placed(view("a", engine(digest="9" * 64), serves_adapters=True), demo=1)
    published = Published(DIGEST, 1, "1" * 64)
    assert made.eviction.room_for(made.table[0], ADAPTER, published) == MODEL


def test_placements_that_change_count_from_then_on() -> None:
    wanted: dict[str, int] = {}
    made = placed(view("a", engine()))
    made.eviction.placements = wanted.items
    assert made.eviction.stays("a") == set()
    wanted[MODEL] = 1
    made.update_routing_table(made.table)  # as the stage does when the store reports a change
    assert made.eviction.stays("a") == {MODEL}


# ---------------------------------------------------------------- what is loaded


def test_an_idle_model_leaves_for_a_placed_one_where_no_agent_has_room() -> None:
    full, busy = view("a", engine("other"), max_models=1), view("b", engine("other", running=1), max_models=1)
    for views, found in (([full, busy], ["a"]), ([full, view("c")], ["c"]), ([busy], [])):
        made = router(*views)
        loads = missing_loads([(MODEL, 1)], made.table, made.is_host, made.room_for)
        assert [load.agent_id for load in loads] == found
    made = placed(full, other=1)
    assert missing_loads([("other", 1), (MODEL, 1)], made.table, made.is_host, made.room_for) == []


def test_an_agent_that_has_just_refused_a_model_is_not_asked_for_it() -> None:
    table = [view("a"), view("b", engine())]
    refused = {"other": {"a"}}
    loads = missing_loads([("other", 1)], table, failed=lambda model: refused.get(model, ()))
    assert loads == [Load("other", "b")]
    # It is free for other models.
    loads = missing_loads([("other", 1), ("third", 1)], table[:1], failed=lambda model: refused.get(model, ()))
    assert loads == [Load("third", "a")]


def test_a_load_that_no_agent_reports_yet_counts() -> None:
    table = [view("a"), view("b")]
    assert missing_loads([(MODEL, 1)], table, loading=lambda model: {"b"}) == []
    assert missing_loads([(MODEL, 2)], table, loading=lambda model: {"b"}) == [Load(MODEL, "a")]


@pytest.mark.parametrize(("silent_s", "loads"), [(3.0, []), (14.9, []), (15.0, [Load(MODEL, "y")])])
def test_a_late_answer_causes_no_further_copy(silent_s: float, loads: list[Load]) -> None:
    table = [view("x", engine(), health="SUSPECT", silent_s=silent_s), view("y")]
    assert missing_loads([(MODEL, 1)], table) == loads
