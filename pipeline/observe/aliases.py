"""Metrics under the names of vLLM and llama-server, so that their dashboards and alerts work (`metrics.aliases`).

Each alias is computed from the merged series of this server's own families when `/metrics` is rendered. What has no
equivalent is left out: an alias never guesses. vLLM's series have the label `model_name`; llama-server's have none and
cover all models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipeline.observe.metric_families import FAMILIES, Family
from pipeline.observe.metrics import Series

Merged = Mapping[str, Mapping[tuple[str, ...], Series]]  # by family, then by labels

MODEL = ("model_name",)
ABORTED = "abort"  # vLLM's reason for every end that is neither a stop nor a limit


class Alias(NamedTuple):
    """A family under another name; `make` returns its series."""

    family: Family
    make: Callable[[Merged], list[Series]]


def _series(merged: Merged, name: str) -> list[Series]:
    return list(merged.get(name, {}).values())


def _by_model(name: str, **wanted: str) -> Callable[[Merged], list[Series]]:
    """The sum of a family's series of each model, of those with the labels `wanted`."""

    def make(merged: Merged) -> list[Series]:
        found: dict[str, Series] = {}
        for model, one in _of_models(merged, name, wanted):
            known = found.get(model)
            if known is None:
                found[model] = Series((model,), one.value, list(one.counts))
            else:
                known.value += one.value
                known.counts = [a + b for a, b in zip(known.counts, one.counts, strict=True)]
        return list(found.values())

    return make


def _of_models(merged: Merged, name: str, wanted: Mapping[str, str]) -> list[tuple[str, Series]]:
    labels = FAMILIES[name].labels
    at = labels.index("model")
    return [
        (one.labels[at], one)
        for one in _series(merged, name)
        if all(one.labels[labels.index(label)] == value for label, value in wanted.items())
    ]


def _total(name: str, **wanted: str) -> Callable[[Merged], list[Series]]:
    """The sum of a family's values, of all models."""

    def make(merged: Merged) -> list[Series]:
        return [Series((), sum(one.value for _, one in _of_models(merged, name, wanted)))]

    return make


def _kv_usage(merged: Merged) -> list[Series]:
    """The share of pages that sequences hold."""
    used = {one.labels[0]: one.value for one in _by_model("starling_kv_cache_pages", state="leased")(merged)}
    totals = _by_model("starling_kv_cache_pages")(merged)
    return [Series(one.labels, used.get(one.labels[0], 0.0) / one.value) for one in totals if one.value]


def _finished(merged: Merged) -> list[Series]:
    """Sequences by model and vLLM's reasons."""
    found: dict[tuple[str, str], Series] = {}
    for one in _series(merged, "starling_finished_total"):
        model, reason = one.labels
        labels = (model, reason if reason in ("stop", "length") else ABORTED)
        found.setdefault(labels, Series(labels)).value += one.value
    return list(found.values())


def _batch(merged: Merged) -> list[Series]:
    """The mean number of sequences in a step."""
    several = _series(merged, "starling_batch_size")
    steps = sum(sum(one.counts) for one in several)
    return [Series((), sum(one.value for one in several) / steps if steps else 0.0)]


def _histogram(name: str, source: str, text: str) -> Alias:
    return Alias(Family(name, "histogram", text, MODEL, FAMILIES[source].bounds), _by_model(source))


VLLM = (
    Alias(
        Family("vllm:num_requests_running", "gauge", "Sequences being generated.", MODEL),
        _by_model("starling_running_sequences"),
    ),
    Alias(
        Family("vllm:num_requests_waiting", "gauge", "Sequences that wait for their first step.", MODEL),
        _by_model("starling_queue_depth"),
    ),
    Alias(Family("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1.", MODEL), _kv_usage),
    Alias(Family("vllm:gpu_cache_usage_perc", "gauge", "The same, under its older name.", MODEL), _kv_usage),
    Alias(
        Family("vllm:prefix_cache_queries_total", "counter", "Prompt tokens that were looked up.", MODEL),
        _by_model("starling_prompt_tokens_total"),
    ),
    Alias(
        Family("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", MODEL),
        _by_model("starling_prompt_tokens_total", source="cached"),
    ),
    Alias(
        Family("vllm:prompt_tokens_total", "counter", "Prompt tokens, cached ones included.", MODEL),
        _by_model("starling_prompt_tokens_total"),
    ),
    Alias(
        Family("vllm:generation_tokens_total", "counter", "Output tokens.", MODEL),
        _by_model("starling_tokens_generated_total"),
    ),
    Alias(
        Family("vllm:num_preemptions_total", "counter", "Running sequences preempted.", MODEL),
        _by_model("starling_preemptions_total"),
    ),
    Alias(Family("vllm:request_success_total", "counter", "Sequences ended.", (*MODEL, "finished_reason")), _finished),
    _histogram(
        "vllm:time_to_first_token_seconds", "starling_time_to_first_token_seconds", "Time to the first output token."
    ),
    _histogram(
        "vllm:time_per_output_token_seconds",
        "starling_time_per_output_token_seconds",
        "Mean time between two output tokens of a request.",
    ),
    _histogram(
        "vllm:inter_token_latency_seconds", "starling_inter_token_seconds", "Each gap between two output tokens."
    ),
    _histogram(
        "vllm:request_queue_time_seconds", "starling_queue_wait_seconds", "Time from arrival to the first step."
    ),
)
LLAMA_SERVER = (
    Alias(
        Family("llamacpp:prompt_tokens_total", "counter", "Prompt tokens computed."),
        _total("starling_prompt_tokens_total", source="computed"),
    ),
    Alias(
        Family("llamacpp:tokens_predicted_total", "counter", "Output tokens."),
        _total("starling_tokens_generated_total"),
    ),
    Alias(
        Family("llamacpp:predicted_tokens_seconds", "gauge", "Output tokens per second."),
        _total("starling_tokens_per_second"),
    ),
    Alias(Family("llamacpp:n_decode_total", "counter", "Steps computed."), _total("starling_steps_total")),
    Alias(Family("llamacpp:n_busy_slots_per_decode", "gauge", "Mean number of sequences in a step."), _batch),
    Alias(
        Family("llamacpp:requests_processing", "gauge", "Sequences being generated."),
        _total("starling_running_sequences"),
    ),
    Alias(Family("llamacpp:requests_deferred", "gauge", "Sequences that wait."), _total("starling_queue_depth")),
)
ALIASES = {"vllm": VLLM, "llama-server": LLAMA_SERVER}
