"""Requests as admission makes them, for tests that need no admission."""

from __future__ import annotations

from typing import Any

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.protocol.messages import Sampling
from shm.pages import NUMERICS
from stages.gateway.requests.spec import RequestSpec, SequenceSpec
from stages.gateway.requests.state import RequestState
from tests.gateway.peers import EOS, MODEL

DIGEST = "ab" * 32


def make_spec(
    name: str = "req-1",
    generation: GenerationRequest | None = None,
    *,
    prompt: bytes = b"1234",
    max_tokens: int = 40,
    sampling: Sampling | None = None,
    stop_ids: tuple[int, ...] = (EOS,),
    **fields: Any,
) -> RequestSpec:
    """One prompt with `generation.n` choices. `fields`: other fields of `RequestSpec`."""
    generation = generation or GenerationRequest(endpoint="generate", model=MODEL)
    sampling = sampling or Sampling(seed=7)
    model = fields.get("model", MODEL)
    defaults = {
        "tenant": "default",
        "model": MODEL,
        "digest": DIGEST,
        "numerics": NUMERICS,
        "seed": sampling.seed,
        "created": 5,
        "fingerprint": "fp",
        "deadline": 1e9,
        "client_id": name,
        "version": model,
    }
    sequences = tuple(SequenceSpec(0, 0, choice, max_tokens, sampling, stop_ids) for choice in range(generation.n))
    return RequestSpec(
        **{"id": name, "generation": generation, "prompts": (prompt,), "sequences": sequences, **defaults, **fields}
    )


def make_state(
    name: str = "req-1",
    generation: GenerationRequest | None = None,
    *,
    until: float = 1e9,
    started_at: float = 0.0,
    **spec: Any,
) -> RequestState:
    """The state of `make_spec`. `until` and `started_at`: of the test's monotonic clock, s."""
    return RequestState(make_spec(name, generation, **spec), until, started_at)
