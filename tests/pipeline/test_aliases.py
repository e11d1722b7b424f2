"""Metrics under other servers' names: every name and label of theirs, with the figures of this server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.observe import exposition
from pipeline.observe.aliases import ALIASES
from pipeline.observe.metric_families import FAMILIES
from pipeline.observe.metrics import Metrics


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
        for reason, count in {"stop": 5, "length": 6, "timeout": 1, "cancelled": 2}.items():
            metrics.set("starling_finished_total", count * times, model, reason)
        for name in ("time_to_first_token", "time_per_output_token", "inter_token", "queue_wait"):
            metrics.observe(f"starling_{name}_seconds", 0.02, model)
        for size in (1, 3):
            metrics.observe("starling_batch_size", size, model)
    text = exposition.render(config, metrics).decode()
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
        assert (alias.family.kind == "counter") == alias.family.name.endswith("_total")


def test_vllms_names(tmp_path: Path) -> None:
    found = exported(tmp_path, "vllm")

    def by_model(name: str) -> dict[str, float]:
        return {dict(labels)["model_name"]: value for labels, value in found[f"vllm:{name}"].items()}

    assert by_model("num_requests_running") == {"a": 2, "b": 20}
    assert by_model("num_requests_waiting") == {"a": 3, "b": 30}
    assert by_model("kv_cache_usage_perc") == by_model("gpu_cache_usage_perc") == {"a": 0.2, "b": 0.2}
    assert by_model("prompt_tokens_total") == by_model("prefix_cache_queries_total") == {"a": 130, "b": 1300}
    assert by_model("prefix_cache_hits_total") == {"a": 30, "b": 300}
    assert by_model("generation_tokens_total") == {"a": 7, "b": 70}
    assert by_model("num_preemptions_total") == {"a": 4, "b": 40}
    reasons = {
        (dict(labels)["model_name"], dict(labels)["finished_reason"]): value
        for labels, value in found["vllm:request_success_total"].items()
    }
    assert reasons == {
        ("a", "stop"): 5,
        ("a", "length"): 6,
        ("a", "abort"): 3,
        ("b", "stop"): 50,
        ("b", "length"): 60,
        ("b", "abort"): 30,
    }
    histograms = ("time_to_first_token", "time_per_output_token", "inter_token_latency", "request_queue_time")
    for name in histograms:
        full = f"{name}_seconds"
        assert by_model(f"{full}_count") == {"a": 1, "b": 1}
        assert by_model(f"{full}_sum") == {"a": 0.02, "b": 0.02}
        buckets = {dict(labels)["le"]: value for labels, value in found[f"vllm:{full}_bucket"].items()}
        assert (buckets["0.01"], buckets["0.025"], buckets["+Inf"]) == (0, 1, 1)


def test_llama_servers_names(tmp_path: Path) -> None:
    """Without labels, summed over the models."""
    found = exported(tmp_path, "llama-server", "vllm")
    expected = {
        "prompt_tokens_total": 1100,
        "tokens_predicted_total": 77,
        "predicted_tokens_seconds": 16.5,
        "n_decode_total": 550,
        "n_busy_slots_per_decode": 2.0,
        "requests_processing": 22,
        "requests_deferred": 33,
    }
    assert {name: found[f"llamacpp:{name}"] for name in expected} == {
        name: {(): value} for name, value in expected.items()
    }
    assert len([name for name in found if name.startswith("llamacpp:")]) == len(expected)


def test_the_page_lists_every_alias() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`((?:vllm|llamacpp):\w+)`", page))
    assert documented == {alias.family.name for aliases in ALIASES.values() for alias in aliases}
