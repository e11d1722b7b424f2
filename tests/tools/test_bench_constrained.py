"""The benchmark of constrained output: its schemas do not end too early, and equal sides have the ratio 1."""

from __future__ import annotations

import json
import random

import pytest

from pipeline.protocol.messages import Constraint
from stages.scheduler.constraints import grammar
from tests.scheduler import vocabularies
from tools.bench.http.constrained import OUTPUT, Side, ratios
from tools.bench.http.schemas import schemas

TOKENIZER = grammar.make_tokenizer(vocabularies.vocabulary())


def test_there_are_sixteen_different_schemas() -> None:
    assert len({json.dumps(schema) for schema in schemas().values()}) == 16


@pytest.mark.parametrize("name", schemas())
def test_no_output_of_a_schema_ends_before_its_last_token(name: str) -> None:
    matcher = grammar.new_matcher(TOKENIZER, Constraint("json_schema", json.dumps(schemas()[name]), "json_schema"))
    rng = random.Random(name)
    for _ in range(OUTPUT):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(vocabularies.SIZE) if mask[token // 8] >> token % 8 & 1]
        assert allowed and not {vocabularies.END, vocabularies.TURN_END} & set(allowed)
        assert matcher.consume_token(rng.choice(allowed))


def side(rate: float, period: float, cpu: float) -> Side:
    return Side(rate, period, {"worker": 0.9 * cpu, "scheduler": 0.1 * cpu}, 0.0, 0)


def test_ratios_are_costs_without_schemas_as_multiples_of_those_with() -> None:
    found = {
        "plain": [side(100, 10, 5), side(50, 20, 5)],
        "again": [side(100, 10, 5), side(50, 20, 5)],
        "schemas": [side(80, 12.5, 6.25), side(45, 20, 5)],
    }
    assert ratios(found, "again") == {name: {"median": 1, "low": 1, "high": 1} for name in ("rate", "period", "cpu")}
    schemas_side = ratios(found, "schemas")
    assert schemas_side["rate"] == {"median": 0.85, "low": 0.8, "high": 0.9}
    assert schemas_side["period"]["low"] == schemas_side["cpu"]["low"] == 0.8
