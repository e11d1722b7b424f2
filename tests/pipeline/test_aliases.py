"""Metrics under other servers' names: every name and label of theirs, with the figures of this server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.observe import exposition
from pipeline.observe.aliases import ALIASES
from pipeline.observe.metric_families import FAMILIES
from pipeline.observe.metrics import Metrics

ROOT = Path(__file__).parents[2]
QUERIED = yaml.safe_load((ROOT / "tests/data/other_servers_metrics.yaml").read_text())


SECONDS = {
    "time_to_first_token": "time_to_first_token",
    "time_per_output_token": "request_time_per_output_token",
    "inter_token": "inter_token_latency",
    "queue_wait": "request_queue_time",
    "end_to_end": "e2e_request_latency",
    "prefill": "request_prefill_time",
    "decode": "request_decode_time",
    "inference": "request_inference_time",
}
TOKENS = {
    "request_prompt_tokens": "request_prompt_tokens",
    "request_computed_tokens": "request_prefill_kv_computed_tokens",
    "request_output_tokens": "request_generation_tokens",
    "request_longest_output_tokens": "request_max_num_generation_tokens",
    "request_max_tokens": "request_params_max_tokens",
    "step_tokens": "iteration_tokens_total",
}
PROCESS = {"cpu_seconds_total": 7, "resident_bytes": 9, "open_fds": 11, "max_fds": 99, "start_time_seconds": 13}


def exported(tmp_path: Path, *aliases: str, empty: bool = False) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Value by name and labels of what /metrics shows after some work of two models."""
    settings: dict[str, Any] = {
        "metrics": {"aliases": list(aliases)},
        "server": {"run_dir": str(tmp_path / "run"), "arena_dir": str(tmp_path / "arenas")},
    }
    config = resolve(settings, {"STARLING_HOME": str(tmp_path)})
    paths.arena_dir(config).mkdir(parents=True, exist_ok=True)
    metrics = Metrics("scheduler", None)
    for model, times in {"a": 1, "b": 10}.items() if not empty else ():
        metrics.set("starling_prompt_tokens_total", 100 * times, model, "computed")
        metrics.set("starling_prompt_tokens_total", 30 * times, model, "cached")
        metrics.set("starling_tokens_generated_total", 7 * times, model)
        metrics.set("starling_tokens_per_second", 1.5 * times, model)
        metrics.set("starling_running_sequences", 2 * times, model)
        metrics.set("starling_queue_depth", 3 * times, model)
        metrics.set("starling_steps_total", 50 * times, model)
        metrics.set("starling_preemptions_total", 4 * times, model)
        for state, pages in {"free": 5, "cached": 3, "leased": 2}.items():
            metrics.set("starling_kv_cache_pages", pages * times, model, state)
        for reason, count in {"stop": 5, "pooled": 4, "length": 6, "timeout": 1, "cancelled": 2, "error": 7}.items():
            metrics.set("starling_finished_total", count * times, model, reason)
        metrics.set("starling_deferred_sequences", times, model)
        metrics.set("starling_prompt_tokens_per_second", 2.5 * times, model)
        metrics.set("starling_context_tokens_max", 300 * times, model)
        for name in SECONDS:
            metrics.observe(f"starling_{name}_seconds", 0.02, model)
        for name in TOKENS:
            metrics.observe(f"starling_{name}", 40, model)
        metrics.observe("starling_request_choices", 2, model)
        for accepted in (0, 2, 1):
            metrics.observe("starling_draft_accepted_tokens", accepted, model, times=times)
        for outcome, count in {"accepted": 3, "rejected": 6}.items():
            for source in ("lookup", "model"):
                metrics.set("starling_draft_tokens_total", count * times, model, outcome, source)
        for size in (1, 3):  # of steps
            metrics.observe("starling_batch_size", size, model)
    if not empty:
        for status, count in {"200": 4, "201": 1, "503": 2}.items():
            metrics.set("starling_requests_total", count, "/v1/models", status)
        metrics.observe("starling_request_duration_seconds", 0.02, "/v1/models")
        for stage in ("gateway", "kv"):
            for name, value in PROCESS.items():
                metrics.set(f"starling_process_{name}", value if stage == "gateway" else 1, stage)
    text = exposition.prepare(config, metrics)().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_there_are_none_by_default(tmp_path: Path) -> None:
    assert not [name for name in exported(tmp_path) if not name.startswith("starling_")]


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("server", ALIASES)
def test_names_are_unique_and_valid(tmp_path: Path, server: str, empty: bool) -> None:
    """Also before the first request."""
    exported(tmp_path, server, empty=empty)
    names = [alias.family.name for alias in ALIASES[server]]
    assert len(set(names)) == len(names)
    assert not set(names) & set(FAMILIES)
    for alias in ALIASES[server]:
        if alias.family.name != "vllm:iteration_tokens_total":  # vLLM's name of a histogram
            assert (alias.family.kind == "counter") == alias.family.name.endswith("_total")


def test_vllms_names(tmp_path: Path) -> None:
    found = exported(tmp_path, "vllm")

    def by_model(name: str, **wanted: str) -> dict[str, float]:
        chosen = [(dict(labels), value) for labels, value in found[f"vllm:{name}"].items()]
        chosen = [(labels, value) for labels, value in chosen if wanted.items() <= labels.items()]
        assert {labels["engine"] for labels, _ in chosen} == {"0"}
        return {labels["model_name"]: value for labels, value in chosen}

    assert by_model("num_requests_running") == {"a": 2, "b": 20}
    assert by_model("num_requests_waiting") == {"a": 4, "b": 40}
    assert by_model("num_requests_waiting_by_reason", reason="capacity") == {"a": 3, "b": 30}
    assert by_model("num_requests_waiting_by_reason", reason="deferred") == {"a": 1, "b": 10}
    assert by_model("kv_cache_usage_perc") == by_model("gpu_cache_usage_perc") == {"a": 0.2, "b": 0.2}
    assert by_model("prompt_tokens_total") == by_model("prefix_cache_queries_total") == {"a": 130, "b": 1300}
    assert by_model("prefix_cache_hits_total") == by_model("prompt_tokens_cached_total") == {"a": 30, "b": 300}
    assert by_model("prompt_tokens_by_source_total", source="local_compute") == {"a": 100, "b": 1000}
    assert by_model("prompt_tokens_by_source_total", source="local_cache_hit") == {"a": 30, "b": 300}
    assert by_model("generation_tokens_total") == {"a": 7, "b": 70}
    assert by_model("num_preemptions_total") == {"a": 4, "b": 40}
    for reason, count in {"stop": 9, "length": 6, "abort": 3, "error": 7}.items():
        assert by_model("request_success_total", finished_reason=reason) == {"a": count, "b": 10 * count}
    assert by_model("spec_decode_num_drafts_total") == {"a": 3, "b": 30}
    assert by_model("spec_decode_num_draft_tokens_total") == {"a": 18, "b": 180}
    assert by_model("spec_decode_num_accepted_tokens_total") == {"a": 6, "b": 60}
    positions = {
        (dict(labels)["model_name"], dict(labels)["position"]): value
        for labels, value in found["vllm:spec_decode_num_accepted_tokens_per_pos_total"].items()
    }
    assert positions == {("a", "0"): 2, ("a", "1"): 1, ("b", "0"): 20, ("b", "1"): 10}
    for name in SECONDS.values():
        full = f"{name}_seconds"
        assert by_model(f"{full}_count") == {"a": 1, "b": 1}
        assert by_model(f"{full}_sum") == {"a": 0.02, "b": 0.02}
        buckets = {dict(labels)["le"]: value for labels, value in found[f"vllm:{full}_bucket"].items()}
        assert (buckets["0.01"], buckets["0.025"], buckets["+Inf"]) == (0, 1, 1)
    assert found["vllm:time_per_output_token_seconds_sum"] == found["vllm:inter_token_latency_seconds_sum"]
    for name in TOKENS.values():
        assert by_model(f"{name}_sum") == {"a": 40, "b": 40}
    assert by_model("request_params_n_sum") == {"a": 2, "b": 2}


def test_names_of_libraries_that_vllm_uses(tmp_path: Path) -> None:
    """Those of its HTTP server, and of its process: the gateway's."""
    found = exported(tmp_path, "vllm")
    endpoint = ("handler", "/v1/models")
    assert found["http_requests_total"] == {(endpoint, ("status", "2xx")): 5, (endpoint, ("status", "5xx")): 2}
    assert found["http_request_duration_seconds_count"] == {(endpoint,): 1}
    assert found["process_cpu_seconds_total"] == {(): 7}
    names = ("resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds")
    assert [found[f"process_{name}"][()] for name in names] == [9, 11, 99, 13]


def test_a_model_without_requests_has_series_of_vllm(tmp_path: Path) -> None:
    """A rate needs a first value of zero."""
    config = resolve(
        {
            "metrics": {"aliases": ["vllm"]},
            "server": {"run_dir": str(tmp_path / "run"), "arena_dir": str(tmp_path / "arenas")},
        },
        {"STARLING_HOME": str(tmp_path)},
    )
    paths.arena_dir(config).mkdir(parents=True)
    metrics = Metrics("scheduler", None)
    metrics.set("starling_steps_total", 0, "new")
    text = exposition.prepare(config, metrics)().decode()
    for line in (
        'vllm:generation_tokens_total{engine="0",model_name="new"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="error",model_name="new"} 0.0',
        'vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="new"} 0.0',
    ):
        assert line in text


def test_llama_servers_names(tmp_path: Path) -> None:
    """Without labels, summed over the models."""
    found = exported(tmp_path, "llama-server", "vllm")
    expected = {
        "prompt_tokens_total": 1100,
        "prompt_tokens_cached_total": 330,
        "prompt_seconds_total": 0.04,
        "prompt_tokens_seconds": 27.5,
        "tokens_predicted_total": 77,
        "tokens_predicted_seconds_total": 0.04,
        "predicted_tokens_seconds": 16.5,
        "n_decode_total": 550,
        "n_busy_slots_per_decode": 2.0,
        "n_tokens_max": 3000,
        "requests_processing": 22,
        "requests_deferred": 44,
        "spec_decode_num_drafts_total": 33,
        "spec_decode_num_draft_tokens_total": 198,
        "spec_decode_num_accepted_tokens_total": 66,
    }
    positions = "spec_decode_num_accepted_tokens_per_pos_total"
    assert {name: found[f"llamacpp:{name}"] for name in expected} == {
        name: {(): value} for name, value in expected.items()
    }
    assert found[f"llamacpp:{positions}"] == {(("position", "0"),): 22, (("position", "1"),): 11}
    assert {name for name in found if name.startswith("llamacpp:")} == {
        f"llamacpp:{name}" for name in (*expected, positions)
    }


@pytest.mark.parametrize("server", ALIASES)
def test_what_dashboards_query_has_its_kind_and_labels(server: str) -> None:
    families = {alias.family.name: alias.family for alias in ALIASES[server]}
    for name, queried in QUERIED[server].items():
        assert families[name].kind == queried["kind"], name
        assert set(queried["labels"]) <= set(families[name].labels), name
    if server == "llama-server":
        assert set(families) == set(QUERIED[server])
    else:
        assert not set(families) & set(QUERIED["vllm_left_out"])


def test_targets_that_dashboards_offer_are_bounds_of_buckets() -> None:
    families = {alias.family.name: alias.family for alias in ALIASES["vllm"]}
    for name, targets in QUERIED["targets"].items():
        assert set(targets) <= {repr(float(bound)) for bound in families[name].bounds}, name


def test_the_page_lists_every_alias() -> None:
    """With its kind and labels, and what is left out."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page[page.index("## Other servers' names") : page.index("## Requests")]
    listed, left_out = section.split("Left out are")
    rows = re.findall(r"^\| (`.*?`) \| (\w+) \| (.*?) ?\| .* \|$", listed, re.M)
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for names, kind, labels in rows
        for name in re.findall(r"`([\w:]+)`", names)
    }
    every = {"model_name", "engine"}  # of vLLM's, named once above the table
    assert documented == {
        alias.family.name: (alias.family.kind, set(alias.family.labels) - every)
        for aliases in ALIASES.values()
        for alias in aliases
    }
    assert sorted(re.findall(r"`(vllm:\w+)`", left_out)) == QUERIED["vllm_left_out"]
