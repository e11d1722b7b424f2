"""What dashboards of vLLM and llama-server query is on a live server's /metrics, and moves with its requests."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import share_caches
from tests.e2e.server import POLL_S, ROOT, wait_gone
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

QUERIED = yaml.safe_load((ROOT / "tests/data/other_servers_metrics.yaml").read_text())
NAMES: dict[str, dict[str, Any]] = {**QUERIED["vllm"], **QUERIED["llama-server"]}
# A request does not change these: there is room for all pages, and a process keeps its start and its limit.
CONSTANT = {"vllm:num_preemptions_total", "process_start_time_seconds", "process_max_fds"}
WAIT_S = 400.0  # that only a failure reaches
PAUSE_S = 0.1  # between two scrapes: stages publish once per second, and a scrape takes 50 ms of a core
# Greedy output of a small model soon repeats itself: the lookup proposes it.
BODY = {"model": "tiny", "prompt": [5, 6, 7] * 20, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
# Some of its choices wait for most of its time, because one computes and few more have a row: a scrape shows the queue
# of one moment. While some wait nothing is proposed.
QUEUED = {**BODY, "n": 4}

Values = dict[str, float]  # by name: the sum of all series


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Up]:
    share_caches(tmp_path)
    model = {
        "name": "tiny",
        "path": str(write_model(tmp_path / "tiny.gguf", SHAPES["small"])),
        "kv_cache_mb": 16,
        "max_batch_size": 1,
        "speculate": 4,
    }
    with Up(tmp_path, {"models": [model], "metrics": {"aliases": ["vllm", "llama-server"]}}) as server:
        yield server


def scrape(server: Up) -> Values:
    """The sum of the series of each name; checks their kinds and labels."""
    status, text, _ = server.request("GET", "/metrics")
    assert status == 200
    found: Values = {}
    kinds = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kinds[name] = family.type
        if name not in NAMES:
            continue
        for sample in family.samples:
            assert set(NAMES[name]["labels"]) <= set(sample.labels), sample
            if sample.labels.get("model_name", "tiny") == "tiny" and not sample.name.endswith("_bucket"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    assert {name: kinds[name] for name in NAMES} == {name: queried["kind"] for name, queried in NAMES.items()}
    return found


def samples_of(names: dict[str, dict[str, Any]]) -> set[str]:
    """Names as queries write them, buckets left out."""
    return {
        f"{name}{suffix}"
        for name, queried in names.items()
        for suffix in (("_sum", "_count") if queried["kind"] == "histogram" else ("",))
    }


def load(server: Up, over: threading.Event) -> None:
    for body in itertools.cycle((QUEUED, BODY, BODY, BODY)):
        if over.is_set():
            return
        assert server.request("POST", "/v1/completions", body)[0] == 200


def test_every_queried_name_moves_with_requests(server: Up) -> None:
    """Its kind and its labels are those that dashboards expect, before the first request as well."""
    deadline = time.monotonic() + WAIT_S
    while "vllm:generation_tokens_total" not in (before := scrape(server)):  # stages publish once per second
        assert time.monotonic() < deadline
        time.sleep(PAUSE_S)
    assert before["vllm:generation_tokens_total"] == 0  # a rate needs a first value
    over = threading.Event()
    client = threading.Thread(target=load, args=(server, over))
    client.start()
    try:
        rest = samples_of(NAMES) - CONSTANT
        deadline = time.monotonic() + WAIT_S
        while rest:
            found = scrape(server)
            rest -= {name for name in rest if found.get(name, 0.0) != before.get(name, 0.0)}
            assert time.monotonic() < deadline, rest
            time.sleep(PAUSE_S)
        assert found["vllm:num_preemptions_total"] == 0
        assert min(found["process_start_time_seconds"], found["process_max_fds"]) > 0
    finally:
        over.set()
        client.join()
    check_figures(server)
    check_restarts(server)


def check_figures(server: Up) -> None:
    """One request more, whose lengths are known."""
    before = settled(server)
    assert server.request("POST", "/v1/completions", BODY)[0] == 200
    after = settled(server)
    grown = {name: after[name] - before[name] for name in after}
    prompt, output = len(BODY["prompt"]), BODY["max_tokens"]
    for name, count in {
        "vllm:prompt_tokens_total": prompt,
        "vllm:request_prompt_tokens_sum": prompt,
        "vllm:generation_tokens_total": output,
        "vllm:request_generation_tokens_sum": output,
        "vllm:request_max_num_generation_tokens_sum": output,
        "vllm:request_success_total": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_decode_time_seconds_count": 1,
        "vllm:prompt_tokens_by_source_total": prompt,
        "llamacpp:tokens_predicted_total": output,
    }.items():
        assert grown[name] == count, name
    computed = grown["vllm:request_prefill_kv_computed_tokens_sum"]
    assert computed == grown["llamacpp:prompt_tokens_total"] == prompt - grown["llamacpp:prompt_tokens_cached_total"]
    phases = ("llamacpp:prompt_seconds_total", "llamacpp:tokens_predicted_seconds_total")
    assert 0 < sum(grown[name] for name in phases) < grown["vllm:e2e_request_latency_seconds_sum"]
    # Each step gives a token and those of its draft that were accepted; later steps may begin before an end is known.
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] < output
    assert after["llamacpp:n_tokens_max"] == prompt + output


def check_restarts(server: Up) -> None:
    """What was scraped stays counted when the processes that count are killed."""
    for stage in ("gateway", "scheduler"):
        seen = settled(server)
        pid = server.pid_of(stage)
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
        deadline = time.monotonic() + WAIT_S
        while not answers(server):
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
        after = scrape(server)
        counted = {
            name
            for name in samples_of({name: one for name, one in NAMES.items() if one["kind"] != "gauge"})
            if after[name] < seen[name]
        }
        assert counted == set()
        assert after["llamacpp:n_tokens_max"] == seen["llamacpp:n_tokens_max"]


def answers(server: Up) -> bool:
    try:
        return server.request("POST", "/v1/completions", BODY)[0] == 200
    except OSError:
        return False


def settled(server: Up) -> Values:
    """A scrape after all stages have written what they counted: nothing runs, and generated tokens are delivered."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = scrape(server)
        delivered = found["vllm:request_generation_tokens_sum"]
        if delivered == found["vllm:generation_tokens_total"] and not found["vllm:num_requests_running"]:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(PAUSE_S)
