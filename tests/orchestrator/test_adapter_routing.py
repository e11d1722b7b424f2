"""Published adapters are routed as models of their own, in the engine of their model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeline.api.adapter_names import adapted_digest, sort_key
from pipeline.errors import ModelNotFound, ModelUnavailable, Overloaded, StarlingError
from pipeline.fleet.bodies import CachedModel, LoadedAdapter, LoadedModel
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.placement import Load, missing_loads
from stages.orchestrator.policies import by_score
from stages.orchestrator.prefixes import BLOCK_BYTES, block_hashes
from stages.orchestrator.router import Published, ScoreRouter
from stages.orchestrator.score import Weights, loaded, version_of
from tests.orchestrator.agents import DIGEST, MODEL, cached, engine, request, view

ADAPTERS = {name: letter * 64 for name, letter in (("first", "1"), ("second", "2"))}
CATALOG = {
    MODEL: Published(DIGEST, 100),
    "other": Published("e" * 64, 100),
    **{f"{MODEL}:{name}": Published(DIGEST, 110, digest) for name, digest in ADAPTERS.items()},
    "other:second": Published("e" * 64, 110, "3" * 64),
    "other:alone": Published("e" * 64, 110, "4" * 64),
}


def with_adapters(*names: str, is_ready: bool = True, **fields: Any) -> LoadedModel:
    """The model with adapters."""
    adapters = tuple(LoadedAdapter(name=one, digest=ADAPTERS[one], bytes=10, is_ready=is_ready) for one in names)
    return engine(adapters=adapters, **fields)


def agent(name: str, *engines: LoadedModel, **fields: Any) -> NodeView:
    return view(name, *engines, **{"serves_adapters": True, **fields})


def routing(*views: NodeView) -> ScoreRouter:
    made = ScoreRouter(Weights(), 100, CATALOG.get, lambda: 0.0, order=by_score, names=CATALOG.keys)
    made.update_routing_table(views)
    return made


def test_the_agent_that_has_the_adapter_serves_it() -> None:
    made = routing(agent("a", engine()), agent("b", with_adapters("first", running=9)))
    route = made.choose(request(model=f"{MODEL}:first"))
    assert route.agent_id == "b" and route.engine is not None
    assert route.engine.digest == adapted_digest(DIGEST, ADAPTERS["first"])
    assert made.models() == {MODEL: ["a", "b"], f"{MODEL}:first": ["b"]}


def test_versions_name_model_and_adapter() -> None:
    details = agent("a", with_adapters("first", "second")).details
    found = [loaded(details, name) for name in (MODEL, f"{MODEL}:first", f"{MODEL}:second")]
    assert len({version_of(one) for one in found if one is not None}) == 3
    assert loaded(details, f"{MODEL}:third") is None and loaded(details, "other:first") is None


@pytest.mark.parametrize("state", ["READY", "LOADING_TO_GPU"])
def test_it_is_loaded_where_its_model_is(state: Any) -> None:
    """Also on an agent that has room for no other model."""
    full = agent("a", engine(model_state=state), engine("other", running=3), max_models=2)
    route = routing(full, agent("b", engine("other", running=1), max_models=1)).choose(request(model=f"{MODEL}:first"))
    assert (route.agent_id, route.engine, route.evict) == ("a", None, "")


def test_an_adapter_whose_agents_are_full_is_loaded_where_its_model_is_idle() -> None:
    """And starts its model on no further agent."""

    def choose(*others: NodeView) -> str:
        made = routing(agent("a", with_adapters("first")), *others)
        for _ in range(100):
            made.begin(made.choose(request(model=MODEL, pinned="a")), request())
        return made.choose(request(model=f"{MODEL}:first"), may_copy=True).agent_id

    empty, host = agent("b", cached_models=(cached(),)), agent("c", engine())
    assert choose(empty, host) == "c"
    for other in (empty, agent("c", engine(running=1)), agent("c", engine(digest="f" * 64))):
        with pytest.raises(Overloaded):
            choose(other)


def test_without_its_model_another_one_may_have_to_leave() -> None:
    made = routing(agent("a", engine("other"), max_models=1, cached_models=(cached(),)))
    assert made.choose(request(model=f"{MODEL}:first")).evict == "other"
    made = routing(agent("a", engine("other", running=1), max_models=1))
    with pytest.raises(ModelUnavailable, match="none of them is idle"):
        made.choose(request(model=f"{MODEL}:first"))


def test_one_that_is_loading_gets_no_requests_yet() -> None:
    made = routing(agent("a", with_adapters("first", is_ready=False)))
    assert made.choose(request(model=f"{MODEL}:first")).engine is None
    assert made.choose(request()).engine is not None


def test_agents_of_older_releases_load_none() -> None:
    made = routing(agent("a", engine(), serves_adapters=False))
    with pytest.raises(ModelUnavailable, match="its release loads no adapters"):
        made.choose(request(model=f"{MODEL}:first"))


def test_a_stream_goes_on_where_its_adapter_must_be_loaded_first() -> None:
    name = f"{MODEL}:first"
    details = agent("gone", with_adapters("first")).details
    began = version_of(loaded(details, name) or engine())
    made = routing(agent("a", engine()))
    assert made.choose(request(model=name, version=began)).agent_id == "a"
    for model, version in ((f"{MODEL}:second", began), (name, version_of(engine())), (MODEL, began)):
        with pytest.raises(ModelUnavailable, match="does not serve the version"):
            made.choose(request(model=model, version=version))
    other_kv = routing(agent("a", with_adapters("first", kv_type="q8")))
    with pytest.raises(ModelUnavailable, match="does not serve the version"):
        other_kv.choose(request(model=name, version=began))


def test_an_unknown_adapter_is_refused_with_the_known_ones() -> None:
    made = routing(agent("a", engine()))
    with pytest.raises(ModelNotFound) as refused:
        made.choose(request(model=f"{MODEL}:third"))
    assert refused.value.message == (f"model {MODEL!r} has no adapter 'third'; it has: {MODEL}:first, {MODEL}:second")
    with pytest.raises(ModelNotFound, match="there is no model 'none:first'"):
        made.choose(request(model="none:first"))


def test_another_engine_serves_no_adapters() -> None:
    made = routing(agent("a", engine("theirs", engine="llama-server", numerics=0)))
    with pytest.raises(StarlingError, match="computed by llama-server") as refused:
        made.choose(request(model="theirs:first"))
    assert refused.value.code == "NOT_IMPLEMENTED"


def test_an_adapter_may_be_named_alone() -> None:
    made = routing(agent("a", engine()))
    assert made.resolve("first") == f"{MODEL}:first"
    assert made.resolve("alone") == "other:alone"
    assert [made.resolve(name) for name in (MODEL, "none", "other:x")] == [MODEL, "none", "other:x"]
    with pytest.raises(ModelNotFound, match=f"{MODEL}:second and other:second"):
        made.resolve("second")


def test_requests_of_adapters_count_for_their_engine() -> None:
    made = routing(agent("a", with_adapters("first", "second")))
    asked = [request(f"r{number}", model) for number, model in enumerate((MODEL, f"{MODEL}:first", f"{MODEL}:second"))]
    routes = [made.choose(one) for one in asked]
    for route, one in zip(routes, asked, strict=True):
        made.begin(route, one)
    assert [made.under_way("a", name) for name in (MODEL, f"{MODEL}:first", "", "other")] == [3, 3, 3, 0]
    assert made.choose(request(model=f"{MODEL}:first")).ahead == 3
    assert made.eviction.idle_model("a", ()) == ""
    for route, one in zip(routes, asked, strict=True):
        made.end(route, one)
    assert made.under_way("a") == 0 and made.eviction.idle_model("a", ()) == MODEL


def test_the_adapter_that_leaves_was_used_longest_ago() -> None:
    made = routing(agent("a", with_adapters("first", "second")))
    for name in ("second", "first"):
        one = request(model=f"{MODEL}:{name}")
        route = made.choose(one)
        made.begin(route, one)
        made.end(route, one)
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:second"
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", {f"{MODEL}:second"}) == f"{MODEL}:first"
    assert (
        made.eviction.idle_adapter("a", "other:first", ()) == made.eviction.idle_adapter("gone", f"{MODEL}:x", ()) == ""
    )


def used(name: str, requests: int, running: int = 0) -> LoadedAdapter:
    """An adapter that has had so many requests."""
    return LoadedAdapter(name=name, digest=ADAPTERS[name], bytes=10, is_ready=True, requests=requests, running=running)


def test_an_adapter_that_another_orchestrator_uses_stays() -> None:
    """Agents report how many requests have named each adapter."""
    made = routing(agent("a", engine(adapters=(used("first", 3), used("second", 7)))))
    for name in ("first", "second"):
        one = request(model=f"{MODEL}:{name}")
        route = made.choose(one)
        made.begin(route, one)
        made.end(route, one)
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:first"
    # Both have had the requests of this orchestrator.
    made.update_routing_table([agent("a", engine(adapters=(used("first", 4), used("second", 8))))])
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:first"
    made.update_routing_table([agent("a", engine(adapters=(used("first", 5), used("second", 8))))])
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:second"
    made.update_routing_table([agent("a", engine(adapters=(used("first", 5), used("second", 8, running=1))))])
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:first"
    busy = engine(adapters=(used("first", 5, running=1), used("second", 8, running=1)))
    made.update_routing_table([agent("a", busy)])
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == ""


def test_a_model_that_another_orchestrator_uses_stays() -> None:
    made = routing(agent("a", engine(requests=1), engine("other", requests=1), max_models=2))
    for name in ("other", MODEL):
        one = request(model=name)
        route = made.choose(one)
        made.begin(route, one)
        made.end(route, one)
    assert made.eviction.idle_model("a", ()) == "other"
    made.update_routing_table([agent("a", engine(requests=2), engine("other", requests=2), max_models=2)])
    assert made.eviction.idle_model("a", ()) == "other"
    made.update_routing_table([agent("a", engine(requests=2), engine("other", requests=3), max_models=2)])
    assert made.eviction.idle_model("a", ()) == MODEL


def test_an_adapter_that_is_loading_or_has_requests_stays() -> None:
    both = with_adapters("first", "second")
    starting = msgspec.structs.replace(both.adapters[0], is_ready=False)
    made = routing(agent("a", msgspec.structs.replace(both, adapters=(starting, both.adapters[1]))))
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:second"
    assert made.eviction.may_adapter_leave("a", f"{MODEL}:second")
    asked = request(model=f"{MODEL}:second")
    route = made.choose(asked)
    made.begin(route, asked)
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == ""
    made.end(route, asked)
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:second"


def test_an_adapter_that_another_orchestrator_has_loaded_counts_as_used_then() -> None:
    made = routing(agent("a", with_adapters("second")))
    asked = request(model=f"{MODEL}:second")
    made.begin(made.choose(asked), asked)
    made.end(made.choose(asked), asked)
    made.update_routing_table([agent("a", with_adapters("first", "second"))])
    assert made.eviction.idle_adapter("a", f"{MODEL}:third", ()) == f"{MODEL}:second"


def test_adapters_of_one_model_are_loaded_where_the_first_one_is() -> None:
    """Even on an agent that must first let another model go, and although a free one has the files."""
    made = routing(agent("a", engine("other"), max_models=1), agent("b", cached_models=(cached(),)))
    made.loading_at = lambda base: {"a"} if base == MODEL else set()
    for model in (MODEL, f"{MODEL}:first", f"{MODEL}:second"):
        route = made.choose(request(model=model))
        assert (route.agent_id, route.evict) == ("a", "")
    assert made.choose(request(model="other:second")).agent_id == "a"


def test_an_agent_that_has_begun_to_load_it_is_preferred() -> None:
    idle = agent("b", engine(), cached_models=(cached(),))
    begun = agent("a", with_adapters("first", is_ready=False, running=2), cached_models=(cached(),))
    assert routing(idle, begun).choose(request(model=f"{MODEL}:first")).agent_id == "a"
    made = routing(idle, begun)
    made.choose(request("r", f"{MODEL}:first"))
    decision = made.decisions.find("r")
    assert decision is not None
    (scored,) = [one for one in decision.choices[0].scores if one.agent_id == "a"]
    assert (scored.level, scored.ahead) == ("CPU_RESIDENT", 2)


def test_another_version_of_its_model_must_leave_first() -> None:
    name, old = f"{MODEL}:first", {"digest": "9" * 64}
    made = routing(agent("a", engine(**old)))
    assert (
        made.choose(request(model=name)).evict == MODEL
        and made.eviction.outdated_model("a", name, CATALOG[name]) == MODEL
    )
    busy = agent("a", engine(running=1, **old))
    with pytest.raises(ModelUnavailable, match="another version of demo, which is not idle"):
        routing(busy).choose(request(model=name))
    assert routing(busy, agent("b", max_models=1)).choose(request(model=name)).agent_id == "b"
    assert routing(busy).choose(request()).agent_id == "a"
    # A placement takes another agent if there is one.
    made = routing(busy, agent("b", max_models=1))
    assert missing_loads([(name, 1)], made.table, made.is_host) == [Load(name, "b")]
    assert missing_loads([(name, 1)], [busy], made.is_host) == [Load(name, "a")]


def test_the_published_version_of_an_adapter_is_preferred() -> None:
    name = f"{MODEL}:first"
    old = engine(adapters=(LoadedAdapter(name="first", digest="8" * 64, bytes=10, is_ready=True),))
    made = routing(agent("a", old), agent("b", with_adapters("first", running=9)))
    assert made.choose(request(model=name)).agent_id == "b"
    assert routing(agent("a", old)).choose(request(model=name)).agent_id == "a"


def test_a_model_that_is_on_a_disk_alone_keeps_its_name() -> None:
    on_disk = CachedModel(digest="7" * 64, names=("first",), cache_level="NVME_CACHED", bytes=1, is_complete=True)
    assert routing(agent("a", engine(), cached_models=(on_disk,))).resolve("first") == "first"


def test_a_name_that_is_asked_for_costs_no_memory() -> None:
    made = routing(agent("a", engine()))
    for number in range(100):
        with pytest.raises(ModelNotFound):
            made.choose(request(model=f"none-{number}"))
        made.place("a", f"none-{number}")
    assert made.rates._engines == {}


def test_prefixes_belong_to_one_adapter() -> None:
    made = routing(agent("a", with_adapters("first")), agent("b", with_adapters("first")))
    text = b"x" * (4 * BLOCK_BYTES)
    blocks = {name: block_hashes(text, f"{name}\0\0") for name in (MODEL, f"{MODEL}:first")}
    sent = request(model=f"{MODEL}:first", blocks=blocks[f"{MODEL}:first"], prompt_bytes=len(text))
    route = made.choose(sent)
    made.begin(route, sent)
    made.end(route, sent)
    again = made.choose(sent)
    assert (again.agent_id, again.new_bytes) == (route.agent_id, 0)
    assert made.choose(request(blocks=blocks[MODEL], prompt_bytes=len(text))).new_bytes == len(text)


def test_an_adapter_is_placed_where_its_model_is() -> None:
    table = [
        agent("a", engine("other"), max_models=1),
        agent("b", engine(), max_models=1),
        agent("c", max_models=1),
        agent("d", max_models=1, serves_adapters=False),
    ]
    name = f"{MODEL}:first"
    assert missing_loads([(name, 1)], table) == [Load(name, "b")]
    assert missing_loads([(name, 4)], table) == [Load(name, "b"), Load(name, "c")]
    assert missing_loads([(name, 1)], [agent("a", with_adapters("first"))]) == []


def test_adapters_follow_their_model() -> None:
    names = ["b", "a:z", "a-b", "a", "a:c", "a-b:x"]
    assert sorted(names, key=sort_key) == ["a", "a:c", "a:z", "a-b", "a-b:x", "b"]
