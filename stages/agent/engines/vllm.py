"""`vllm serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import EngineConfig
from stages.agent.engines.dialect import Dialect
from stages.agent.engines.interface import Queue


class Vllm(Dialect):
    """The engine `vllm`."""

    name = "vllm"
    honoured = frozenset(
        {
            *("min_p", "top_k", "ignore_eos", "repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("cache_salt", "logprobs"),
        }
    )
    separates_tenants = True
    counts_choices = False

    def command(self, engine: EngineConfig, port: int) -> list[str]:
        """See `Dialect`. Its own defaults for sampling come from the model's files otherwise."""
        own = ["serve", engine.path, "--served-model-name", engine.model, "--host", "127.0.0.1", "--port", str(port)]
        return [engine.program or "vllm", *own, "--generation-config", "vllm", *engine.args]

    def environment(self, key: str) -> dict[str, str]:
        """See `Dialect`. It loads files of this host only, and reports nothing to its makers.

        Its processes name themselves; without SPT_NOENV (of setproctitle) they would write the name over the
        environment in /proc, by which fence.py finds what a killed agent has left.
        """
        own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "SPT_NOENV": "1"}
        return {"VLLM_API_KEY": key, **own}

    def queue(self, metrics: Mapping[str, float]) -> Queue:
        """See `Dialect`."""
        asked = metrics.get("vllm:prefix_cache_queries_total", 0.0)
        hits = metrics.get("vllm:prefix_cache_hits_total", 0.0)
        return Queue(
            int(metrics.get("vllm:num_requests_running", 0)),
            int(metrics.get("vllm:num_requests_waiting", 0)),
            round(hits / asked, 4) if asked else 0.0,
            int(metrics.get("vllm:request_success_total", 0)),
        )

    def parameters(self, request: GenerationRequest, seed: int, *, salt: str, may_reuse: bool) -> dict[str, Any]:
        """See `Dialect`."""
        sampling = request.sampling
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "seed": seed & ((1 << 63) - 1),
            "ignore_eos": sampling.ignore_eos,
            **({"cache_salt": salt} if salt else {}),
        }

    def unfit_field(self, request: GenerationRequest) -> str:
        """See `Dialect`. Of calls that are not forced few of its parsers keep the arguments to their schema."""
        return request.tools.strict_field if request.tools and request.tools.strict and not request.tools.forced else ""

    def tokens(self, event: Mapping[str, Any]) -> int | None:
        """See `Dialect`."""
        usage = event.get("usage")
        found = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return found if isinstance(found, int) else None
