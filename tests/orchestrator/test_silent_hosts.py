"""Agents whose disk or engine does not answer: nothing is placed by what they knew before."""

from __future__ import annotations

import pytest

from pipeline.errors import ModelUnavailable
from stages.orchestrator.idle_models import IdleModels
from stages.orchestrator.placement import missing_loads
from tests.orchestrator.agents import MODEL, cached, engine, request, router, view


def test_no_model_is_loaded_where_the_disk_is_silent() -> None:
    silent = view("a", cached_models=(cached(),), files_silent_s=4.0)
    other = view("b")
    assert router(silent, other).choose(request()).agent_id == "b"
    with pytest.raises(ModelUnavailable, match="its disk has not answered for 4 s"):
        router(silent).choose(request())
    serving = view("a", engine(), files_silent_s=4.0)
    assert router(serving, other).choose(request()).agent_id == "a"  # which needs no file any more


def test_no_placement_begins_where_the_disk_is_silent() -> None:
    silent = view("a", cached_models=(cached(),), files_silent_s=4.0)
    assert [load.agent_id for load in missing_loads([(MODEL, 1)], [silent, view("b")])] == ["b"]


def test_a_model_whose_engine_is_silent_is_not_idle() -> None:
    now = [0.0]
    idle = IdleModels(lambda: now[0], lambda agent, model: 0)
    silent, other = view("a", engine(silent_s=4.0)), view("b", engine())
    for now[0] in (0.0, 100.0):
        idle.observe([silent, other])
    assert [one.agent_id for one in idle.due([silent, other], 50.0, lambda agent_id: ())] == ["b"]
    full = view("a", engine("old", silent_s=4.0), engine("older", silent_s=4.0))
    with pytest.raises(ModelUnavailable, match="none of them is idle"):
        router(full).choose(request())
