"""llama.cpp's `llama-server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import EngineConfig
from stages.agent.engines.dialect import ChatTemplate, Dialect
from stages.agent.engines.interface import Queue

RANDOM_SEED = (1 << 32) - 1  # which means: draw one
# In the order in which our sampler applies them (docs/api/parameters.md); its own default ends with the temperature.
SAMPLERS = ["temperature", "top_k", "top_p", "min_p"]


class LlamaServer(Dialect):
    """The engine `llama-server`."""

    name = "llama-server"
    # Its penalties count the prompt's tokens too, and of a window only: they mean something else.
    # Its log probabilities of a completion have another form than OpenAI's.
    honoured = frozenset({"min_p", "top_k", "ignore_eos"})
    separates_tenants = False
    counts_choices = True
    template_path = "/props"

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

    def template(self, said: Mapping[str, Any]) -> ChatTemplate:
        """See `Dialect`. Releases that do not say it have the same gaps."""
        found = said.get("chat_template_caps")
        caps = found if isinstance(found, dict) else {}
        return ChatTemplate(bool(caps.get("supports_tools")), bool(caps.get("supports_tool_calls")))

    def unfit_field(self, request: GenerationRequest) -> str:
        """See `Dialect`.

        A forced call may come after any text there, and a name is ignored. Arguments match their schema only where it
        has found out how the template marks a call. Of JSON it has no log probabilities for a part of the tokens.
        """
        if request.tools and request.tools.forced:
            return "tool_choice"
        if request.tools and request.tools.strict:
            return request.tools.strict_field
        return "logprobs" if request.logprobs and (request.tools or request.constraint) else ""

    def logprobs(self, request: GenerationRequest) -> dict[str, Any]:
        """See `Dialect`. For 0 of the most likely tokens it would give none at all."""
        return {"logprobs": True, "top_logprobs": max(1, request.top_logprobs)}

    def tokens(self, event: Mapping[str, Any]) -> int | None:
        """See `Dialect`."""
        timings = event.get("timings")
        found = timings.get("predicted_n") if isinstance(timings, dict) else None
        return found if isinstance(found, int) else None
