"""Metrics under the names of vLLM and llama-server, so that their dashboards and alerts work (`metrics.aliases`).

Each alias is computed from the merged series of this server's own families when `/metrics` is rendered. What has no
equivalent is left out, docs/metrics.md says why: an alias never guesses. vLLM's series of a model have the labels
`model_name` and `engine`, and are there with the model, not with its first value; llama-server's cover all models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from pipeline.observe.metric_families import FAMILIES, Family, Kind
from pipeline.observe.metrics import Series

Merged = Mapping[str, Mapping[tuple[str, ...], Series]]  # by family, then by labels
Make = Callable[[Merged], list[Series]]

ENGINE = "0"  # vLLM numbers the data-parallel engines of a model; here it has one
GATEWAY = "gateway"  # the process that vLLM calls its API server
# vLLM's reasons, by this server's. It has none for a request whose time is over: that is an end from outside, too.
FINISHED = {"stop": "stop", "pooled": "stop", "length": "length", "error": "error", "cancelled": "abort"}
ABORTED = "abort"
SOURCES = {"computed": "local_compute", "cached": "local_cache_hit"}  # of prompt tokens


class Alias(NamedTuple):
    """A family under another name; `make` returns its series."""

    family: Family
    make: Make


# -------------------------------------------------------------- sources


def _series(merged: Merged, name: str) -> list[Series]:
    return list(merged.get(name, {}).values())


def _add(found: dict[tuple[str, ...], Series], labels: tuple[str, ...], one: Series) -> None:
    known = found.get(labels)
    if known is None:
        found[labels] = Series(labels, one.value, list(one.counts))
    else:
        known.value += one.value
        known.counts = [a + b for a, b in zip(known.counts, one.counts, strict=True)]


def _by(name: str, label: str, **wanted: str) -> Make:
    """The sum of a family's series for each value of `label`, of those with the labels `wanted`."""
    labels = FAMILIES[name].labels
    at = labels.index(label)

    def make(merged: Merged) -> list[Series]:
        found: dict[tuple[str, ...], Series] = {}
        for one in _series(merged, name):
            if all(one.labels[labels.index(key)] == value for key, value in wanted.items()):
                _add(found, (one.labels[at],), one)
        return list(found.values())

    return make


def _by_model(name: str, **wanted: str) -> Make:
    return _by(name, "model", **wanted)


def _total(name: str, **wanted: str) -> Make:
    """The sum of a family's values, of all models; of a histogram that of all its values."""
    of_models = _by_model(name, **wanted)

    def make(merged: Merged) -> list[Series]:
        return _sum(of_models(merged))

    return make


def _renamed(name: str, names: Mapping[str, str], other: str = "") -> Make:
    """By model and the family's second label, under other names; what has none is `other`."""

    def make(merged: Merged) -> list[Series]:
        found: dict[tuple[str, ...], Series] = {}
        for model in _models(merged):
            for value in names.values():
                found[model, value] = Series((model, value))
        for one in _series(merged, name):
            _add(found, (one.labels[0], names.get(one.labels[1], other)), one)
        return list(found.values())

    return make


def _models(merged: Merged) -> Iterator[str]:
    """The models of the server."""
    return (one.labels[0] for one in _series(merged, "starling_steps_total"))


def _kv_usage(merged: Merged) -> list[Series]:
    """The share of pages that sequences hold."""
    used = {one.labels[0]: one.value for one in _by_model("starling_kv_cache_pages", state="leased")(merged)}
    totals = _by_model("starling_kv_cache_pages")(merged)
    return [Series(one.labels, used.get(one.labels[0], 0.0) / one.value) for one in totals if one.value]


def _waiting(merged: Merged) -> list[Series]:
    """Sequences in the queue, and those outside it that do not compute yet."""
    found: dict[tuple[str, ...], Series] = {}
    for name in ("starling_queue_depth", "starling_deferred_sequences"):
        for one in _by_model(name)(merged):
            _add(found, one.labels, one)
    return list(found.values())


def _waiting_by_reason(merged: Merged) -> list[Series]:
    return [
        Series((*one.labels, reason), one.value)
        for reason, name in (("capacity", "starling_queue_depth"), ("deferred", "starling_deferred_sequences"))
        for one in _by_model(name)(merged)
    ]


def _drafts(merged: Merged) -> list[Series]:
    """Verifications, by model."""
    return [Series(one.labels, sum(one.counts)) for one in _by_model("starling_draft_accepted_tokens")(merged)]


def _accepted_by_position(merged: Merged) -> list[Series]:
    """Verifications that accepted the token at each position, by model. A bound of the histogram is a position."""
    found = []
    for one in _by_model("starling_draft_accepted_tokens")(merged):
        total = sum(one.counts)
        reached = [total - below for below in accumulate(one.counts[:-1])]
        found += [Series((*one.labels, str(place)), count) for place, count in enumerate(reached) if count]
    return found


def _sum(several: list[Series]) -> list[Series]:
    return [Series((), sum(one.value for one in several))]


def _of_all(make: Make) -> Make:
    """The sum over the models, of series whose first label is the model."""

    def total(merged: Merged) -> list[Series]:
        found: dict[tuple[str, ...], Series] = {}
        for one in make(merged):
            _add(found, one.labels[1:], one)
        return list(found.values())

    return total


def _batch(merged: Merged) -> list[Series]:
    """The mean number of sequences in a step."""
    several = _series(merged, "starling_batch_size")
    steps = sum(sum(one.counts) for one in several)
    return [Series((), sum(one.value for one in several) / steps if steps else 0.0)]


def _longest(merged: Merged) -> list[Series]:
    return [Series((), max((one.value for one in _series(merged, "starling_context_tokens_max")), default=0.0))]


def _process(name: str, kind: Kind, text: str, source: str) -> Alias:
    """A figure of the gateway's process, under the name that Prometheus's libraries give it."""
    of_stage = _by(f"starling_process_{source}", "stage", stage=GATEWAY)
    return Alias(Family(f"process_{name}", kind, text), lambda merged: _sum(of_stage(merged)))


def _requests(merged: Merged) -> list[Series]:
    """HTTP requests by endpoint and class of status."""
    found: dict[tuple[str, ...], Series] = {}
    for one in _series(merged, "starling_requests_total"):
        endpoint, status = one.labels
        _add(found, (endpoint, f"{status[:1]}xx"), one)
    return list(found.values())


# -------------------------------------------------------------- vLLM


def _vllm(name: str, kind: Kind, text: str, make: Make, *labels: str, bounds: tuple[float, ...] = ()) -> Alias:
    """A family whose series `make` returns by model, and then by `labels`. Without these each model has a series."""
    family = Family(f"vllm:{name}", kind, text, ("model_name", "engine", *labels), bounds)

    def of_engines(merged: Merged) -> list[Series]:
        found = {one.labels: one for one in make(merged)}
        if not labels and kind != "gauge":
            for model in _models(merged):
                found.setdefault((model,), Series((model,), 0.0, [0] * (len(bounds) + 1) if bounds else []))
        return [Series((model, ENGINE, *others), one.value, one.counts) for (model, *others), one in found.items()]

    return Alias(family, of_engines)


def _histogram(name: str, source: str, text: str) -> Alias:
    return _vllm(name, "histogram", text, _by_model(source), bounds=FAMILIES[source].bounds)


def _counter(name: str, text: str, make: Make, *labels: str) -> Alias:
    return _vllm(name, "counter", text, make, *labels)


def _gauge(name: str, text: str, make: Make, *labels: str) -> Alias:
    return _vllm(name, "gauge", text, make, *labels)


VLLM = (
    _gauge("num_requests_running", "Sequences being generated.", _by_model("starling_running_sequences")),
    _gauge("num_requests_waiting", "Sequences that wait for their first step.", _waiting),
    _gauge("num_requests_waiting_by_reason", "The same, in the queue or outside it.", _waiting_by_reason, "reason"),
    _gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", _kv_usage),
    _gauge("gpu_cache_usage_perc", "The same, under its older name.", _kv_usage),
    _counter(
        "prefix_cache_queries_total", "Prompt tokens that were looked up.", _by_model("starling_prompt_tokens_total")
    ),
    _counter(
        "prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache.",
        _by_model("starling_prompt_tokens_total", source="cached"),
    ),
    _counter("prompt_tokens_total", "Prompt tokens, cached ones included.", _by_model("starling_prompt_tokens_total")),
    _counter(
        "prompt_tokens_cached_total",
        "Prompt tokens that were cached.",
        _by_model("starling_prompt_tokens_total", source="cached"),
    ),
    _counter(
        "prompt_tokens_by_source_total",
        "Prompt tokens, computed or cached.",
        _renamed("starling_prompt_tokens_total", SOURCES),
        "source",
    ),
    _counter("generation_tokens_total", "Output tokens.", _by_model("starling_tokens_generated_total")),
    _counter("num_preemptions_total", "Running sequences preempted.", _by_model("starling_preemptions_total")),
    _counter(
        "request_success_total",
        "Sequences ended.",
        _renamed("starling_finished_total", FINISHED, ABORTED),
        "finished_reason",
    ),
    _histogram("iteration_tokens_total", "starling_step_tokens", "Positions that a step computes."),
    _histogram(
        "time_to_first_token_seconds", "starling_time_to_first_token_seconds", "Time to the first output token."
    ),
    _histogram("inter_token_latency_seconds", "starling_inter_token_seconds", "Each gap between two output tokens."),
    _histogram("time_per_output_token_seconds", "starling_inter_token_seconds", "The same, under its older name."),
    _histogram(
        "request_time_per_output_token_seconds",
        "starling_time_per_output_token_seconds",
        "Mean time between two output tokens of a request.",
    ),
    _histogram("e2e_request_latency_seconds", "starling_end_to_end_seconds", "Time of a request."),
    _histogram(
        "request_queue_time_seconds",
        "starling_queue_wait_seconds",
        "Time from arrival, or from the end of the model's load if that is later, to the first step.",
    ),
    _histogram("request_prefill_time_seconds", "starling_prefill_seconds", "Time from the queue to the first token."),
    _histogram("request_decode_time_seconds", "starling_decode_seconds", "Time from the first token to the last one."),
    _histogram(
        "request_inference_time_seconds", "starling_inference_seconds", "Time from the queue to the last token."
    ),
    _histogram("request_prompt_tokens", "starling_request_prompt_tokens", "Prompt tokens of a request."),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "starling_request_computed_tokens",
        "Prompt tokens of a request that were not cached.",
    ),
    _histogram("request_generation_tokens", "starling_request_output_tokens", "Output tokens of a request."),
    _histogram(
        "request_max_num_generation_tokens",
        "starling_request_longest_output_tokens",
        "Output tokens of the longest choice of a request.",
    ),
    _histogram("request_params_max_tokens", "starling_request_max_tokens", "Output tokens that a choice may have."),
    _histogram("request_params_n", "starling_request_choices", "Choices for each prompt of a request."),
    _counter("spec_decode_num_drafts_total", "Verifications of draft tokens.", _drafts),
    _counter("spec_decode_num_draft_tokens_total", "Draft tokens.", _by_model("starling_draft_tokens_total")),
    _counter(
        "spec_decode_num_accepted_tokens_total",
        "Draft tokens accepted.",
        _by_model("starling_draft_tokens_total", outcome="accepted"),
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by their position in the draft.",
        _accepted_by_position,
        "position",
    ),
    Alias(Family("http_requests_total", "counter", "HTTP requests answered.", ("handler", "status")), _requests),
    Alias(
        Family(
            "http_request_duration_seconds",
            "histogram",
            "Time of an HTTP request.",
            ("handler",),
            FAMILIES["starling_request_duration_seconds"].bounds,
        ),
        _by("starling_request_duration_seconds", "endpoint"),
    ),
    _process("cpu_seconds_total", "counter", "CPU time of the gateway.", "cpu_seconds_total"),
    _process("resident_memory_bytes", "gauge", "Resident memory of the gateway.", "resident_bytes"),
    _process("open_fds", "gauge", "Open file descriptors of the gateway.", "open_fds"),
    _process("max_fds", "gauge", "File descriptors that the gateway may open.", "max_fds"),
    _process("start_time_seconds", "gauge", "When the gateway started, in s since 1970.", "start_time_seconds"),
)

# -------------------------------------------------------------- llama-server


def _llama(name: str, kind: Kind, text: str, make: Make, *labels: str) -> Alias:
    return Alias(Family(f"llamacpp:{name}", kind, text, labels), make)


LLAMA_SERVER = (
    _llama(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens computed.",
        _total("starling_prompt_tokens_total", source="computed"),
    ),
    _llama(
        "prompt_tokens_cached_total",
        "counter",
        "Prompt tokens that were cached.",
        _total("starling_prompt_tokens_total", source="cached"),
    ),
    _llama(
        "prompt_seconds_total",
        "counter",
        "Time of all sequences from the queue to the first token.",
        _total("starling_prefill_seconds"),
    ),
    _llama("tokens_predicted_total", "counter", "Output tokens.", _total("starling_tokens_generated_total")),
    _llama(
        "tokens_predicted_seconds_total",
        "counter",
        "Time of all sequences from the first token to the last one.",
        _total("starling_decode_seconds"),
    ),
    _llama(
        "prompt_tokens_seconds",
        "gauge",
        "Prompt tokens computed per second.",
        _total("starling_prompt_tokens_per_second"),
    ),
    _llama("predicted_tokens_seconds", "gauge", "Output tokens per second.", _total("starling_tokens_per_second")),
    _llama("n_decode_total", "counter", "Steps computed.", _total("starling_steps_total")),
    _llama("n_busy_slots_per_decode", "gauge", "Mean number of sequences in a step.", _batch),
    _llama("n_tokens_max", "gauge", "Most tokens that a sequence has had.", _longest),
    _llama("requests_processing", "gauge", "Sequences being generated.", _total("starling_running_sequences")),
    _llama("requests_deferred", "gauge", "Sequences that wait.", lambda merged: _sum(_waiting(merged))),
    _llama("spec_decode_num_drafts_total", "counter", "Verifications of draft tokens.", lambda m: _sum(_drafts(m))),
    _llama("spec_decode_num_draft_tokens_total", "counter", "Draft tokens.", _total("starling_draft_tokens_total")),
    _llama(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Draft tokens accepted.",
        _total("starling_draft_tokens_total", outcome="accepted"),
    ),
    _llama(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens accepted, by their position in the draft.",
        _of_all(_accepted_by_position),
        "position",
    ),
)
ALIASES = {"vllm": VLLM, "llama-server": LLAMA_SERVER}
