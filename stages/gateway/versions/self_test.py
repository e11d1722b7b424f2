"""The self-test: a version of a model answers before anybody is sent to it.

A fixed text is tokenized, generated from and decoded by the very stages that will serve requests.  Where the
version that serves now is of the same file, its answer must be the same, token by token.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from array import array
from typing import TYPE_CHECKING

from pipeline.errors import InferenceError
from pipeline.models.versions import ModelVersion
from pipeline.protocol.messages import Sampling
from stages.gateway.endpoints.generation_request import GenerationRequest
from stages.gateway.http.sinks import WholeResponse
from stages.gateway.requests.state import RequestState, SequenceState

if TYPE_CHECKING:
    from stages.gateway.service import Service

TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times. "
TOKENS = 8  # generated
TIMEOUT_S = 60.0
PRIORITY = 1_000  # more than a key can have


async def check(service: Service, instance: ModelVersion, reference: ModelVersion | None = None) -> None:
    """Raises `StarlingError` when the version cannot answer, or differently from `reference`.

    `reference`: another version that serves; compared with when it is of the same file and KV type.
    """
    answer = await _answer(service, instance)
    if reference is None or not service.is_ready(reference):
        return
    one, other = service.described[instance.id], service.described[reference.id]
    if (one.digest, instance.settings.kv_type) != (other.digest, reference.settings.kv_type):
        return
    expected = await _answer(service, reference)
    if answer != expected:
        raise InferenceError(
            f"the self-test of {instance.id} answered {answer}, and {reference.id}, which is of the same file, "
            f"answered {expected}"
        )


async def _answer(service: Service, instance: ModelVersion) -> tuple[int, ...]:
    described, bounds = service.described[instance.id], service.bounds(instance)
    prompt = (await service.questions.encode(instance.id, TEXT)).tokens or (0,)
    n = max(1, min(TOKENS, bounds.max_output_tokens or TOKENS, bounds.context // 2))
    room = min(bounds.context - n, bounds.max_prompt_tokens or bounds.context)
    request = RequestState(
        f"req-{secrets.token_hex(12)}",
        # With a salt of its own: nothing of it is to come from a cache.
        GenerationRequest(endpoint="selftest", model=instance.name, cache_salt=secrets.token_hex(12)),
        instance.name,
        "",
        service.clock() + TIMEOUT_S,
        priority=PRIORITY,
        started_at=service.clock(),
        instance=instance.id,
    )
    request.is_probe = True
    request.tokenizer = described.tokenizer
    sampling = Sampling(temperature=0.0, logprobs=0, ignore_eos=True)
    data = array("i", prompt[: max(1, room)]).tobytes()
    sequence = SequenceState(request, 0, 0, 0, data, n, sampling, ())
    request.sequences.append(sequence)
    request.sink = sink = WholeResponse()
    service.relay.open(request)
    try:
        await sink.over  # an error of the request is raised here
    except asyncio.CancelledError:
        service.relay.abandon(request)
        raise
    tokens = tuple(sequence.tokens)
    sound = all(0 <= token < described.vocab_size for token in tokens)
    finite = all(math.isfinite(one.logprob) for one in sequence.logprobs)
    if len(tokens) != n or not sound or not finite or len(sequence.logprobs) != n:
        raise InferenceError(
            f"the self-test of {instance.id} asked for {n} tokens and got {list(tokens)} with logprobs "
            f"{[one.logprob for one in sequence.logprobs]}"
        )
    return tokens
