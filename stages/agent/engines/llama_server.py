"""llama.cpp's `llama-server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import EngineConfig
from stages.agent.engines.dialect import Dialect
from stages.agent.engines.interface import Queue

RANDOM_SEED = (1 << 32) - 1  # which means: draw one
# In the order in which our sampler applies them (docs/api/parameters.md); its own default ends with the temperature.
SAMPLERS = ["temperature", "top_k", "top_p", "min_p"]


class LlamaServer(Dialect):
    """The engine `llama-server`."""

    name = "llama-server"
    # Its penalties count the prompt's tokens too, and of a window only: they mean something else.
    honoured = frozenset({"min_p", "top_k", "ignore_eos"})
    separates_tenants = False

    def command(self, engine: EngineConfig, port: int) -> list[str]:
        """See `Dialect`. Prompts that left a slot are not kept in memory besides (its default is 8 GB)."""
        own = ["--model", engine.path, "--alias", engine.model, "--host", "127.0.0.1", "--port", str(port)]
        own += ["--metrics", "--no-slots", "--no-webui", "--no-prefill-assistant", "--no-context-shift"]
        bound = [] if {"-cram", "--cache-ram"} & set(engine.args) else ["--cache-ram", "0"]
        return [engine.program or "llama-server", *own, *bound, *engine.args]

    def environment(self, key: str) -> dict[str, str]:
        """See `Dialect`."""
        return {"LLAMA_API_KEY": key}

    def queue(self, metrics: Mapping[str, float]) -> Queue:
        """See `Dialect`. It does not count what its cache has saved."""
        return Queue(
            int(metrics.get("llamacpp:requests_processing", 0)), int(metrics.get("llamacpp:requests_deferred", 0))
        )

    def parameters(self, request: GenerationRequest, seed: int, *, salt: str, may_reuse: bool) -> dict[str, Any]:
        """See `Dialect`. Its cache knows no salt: without `may_reuse` each prompt is computed as a whole."""
        sampling = request.sampling
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": SAMPLERS,
            "repeat_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": seed % RANDOM_SEED,
            "ignore_eos": sampling.ignore_eos,
            "cache_prompt": may_reuse,
            "timings_per_token": True,
            **({"reasoning_format": "none"} if request.messages is not None else {}),
        }

    def tokens(self, event: Mapping[str, Any]) -> int | None:
        """See `Dialect`."""
        timings = event.get("timings")
        found = timings.get("predicted_n") if isinstance(timings, dict) else None
        return found if isinstance(found, int) else None
