"""A live server exports exactly the documented metrics, and they count on when stages die."""

from __future__ import annotations

import os
import signal
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.observe.status import read_all
from tests.e2e.server import Server, wait_gone
from tests.tools.test_metric_names import documented

pytestmark = pytest.mark.slow


def test_a_live_server_exports_the_documented_names(demo_server: Server) -> None:
    body = {"prompt": list(range(300, 400)), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    status, answer, _ = demo_server.request("POST", "/v1/generate", body)
    assert status == 200, answer
    demo_server.wait_metrics("starling_model_load_seconds", bool)  # stages publish their metrics once per second
    wanted = [("kv", "used"), *((arena, "reserved") for arena in ("kv", "steps", "activations"))]

    def has_arenas(found: dict[str, float]) -> bool:
        """Each stage publishes its own."""
        return all(any(f'"{a}"' in key and f'"{b}"' in key and found[key] for key in found) for a, b in wanted)

    demo_server.wait_metrics("starling_arena_bytes", has_arenas)
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
    for name in (
        "starling_time_to_first_token_seconds",
        "starling_time_per_output_token_seconds",
        "starling_inter_token_seconds",
    ):
        assert any(sample.value for sample in exported[name].samples), name
    for name in ("starling_http_bytes_total", "starling_heartbeats_total", "starling_edge_bytes_total"):
        assert any(sample.value for sample in exported[name].samples), name
    kinds = {sample.labels["kind"]: sample.value for sample in exported["starling_tenant_request_tokens_total"].samples}
    assert kinds["output"] >= 5
    arenas = {
        (sample.labels["arena"], sample.labels["state"]): sample.value
        for sample in exported["starling_arena_bytes"].samples
    }
    assert min(arenas[arena, "reserved"] for arena in ("kv", "steps", "activations")) > 0
    assert 0 < arenas["kv", "used"] < arenas["kv", "reserved"]
    phases = {sample.labels["phase"] for sample in exported["starling_model_load_seconds"].samples}
    assert {"open", "start ranks"} <= phases


def counted(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All series of counters and histograms."""
    status, text, _ = server.request("GET", "/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram") and family.name.startswith("starling_")
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def wait_ready(server: Server, stage: str, killed: int) -> None:
    """Wait until the stage's successor and the server are ready."""
    deadline = time.monotonic() + 120
    while True:
        found = [record for record in read_all(server.home / "run") if record.stage == stage and record.alive]
        if found and found[0].pid != killed and found[0].ready and server.request("GET", "/ready")[0] == 200:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_no_counter_goes_back_when_stages_are_killed(demo_server: Server) -> None:
    """Each stage in turn, and the ranks with the worker: what was scraped stays counted."""
    body = {"prompt": "One, two,", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    worker = next(record.stage for record in read_all(demo_server.home / "run") if record.stage.startswith("worker-"))
    before = counted(demo_server)
    for stage in ("gateway", "tokenizer", "scheduler", "kv", worker):
        assert demo_server.request("POST", "/v1/generate", body)[0] == 200
        seen = counted(demo_server)
        pid = demo_server.pid_of(stage)
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
        wait_ready(demo_server, stage, pid)
        assert demo_server.request("POST", "/v1/generate", body)[0] == 200
        after = counted(demo_server)
        assert not {key: (value, after.get(key)) for key, value in seen.items() if after.get(key, -1.0) < value}
        restarts = "starling_stage_restarts_total", frozenset({("stage", stage)})
        assert after[restarts] == before[restarts] + 1
