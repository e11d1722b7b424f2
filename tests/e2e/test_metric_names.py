"""A live server exports exactly the documented metrics, and they count on when stages die."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server
from tests.tools.test_metric_names import documented

pytestmark = pytest.mark.slow


def test_a_live_server_exports_the_documented_names(demo_server: Server) -> None:
    body = {"prompt": "One, two,", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    status, answer, _ = demo_server.request("POST", "/v1/generate", body)
    assert status == 200, answer
    demo_server.wait_metrics("starling_model_load_seconds", bool)  # stages publish their metrics once per second
    status, text, _ = demo_server.request("GET", "/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exported = {f"{name}_total" if family.type == "counter" else name: family for name, family in families.items()}
    assert {name for name in exported if name.startswith("starling_")} == set(documented())
    for name, (kind, labels, meaning) in documented().items():
        family = exported[name]
        assert (family.type, family.documentation) == (kind, meaning)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(labels), sample
    for name in ("starling_time_to_first_token_seconds", "starling_time_per_output_token_seconds"):
        assert any(sample.value for sample in exported[name].samples), name
    phases = {sample.labels["phase"] for sample in exported["starling_model_load_seconds"].samples}
    assert {"open", "start ranks"} <= phases
