"""The self-test of a version, before requests are sent to it.

The stages that will serve it tokenize a fixed text and generate from it, or embed it.  If the serving version is of the
same file, its tokens (or its vector) must be equal.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from array import array
from collections.abc import Callable

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import InferenceError
from pipeline.models.versions import ModelVersion
from pipeline.protocol.messages import Sampling
from shm.pages import NUMERICS
from stages.gateway.http.sinks import WholeResponse
from stages.gateway.requests.embedder import Embedder, EmbeddingCall
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.spec import RequestSpec, SequenceSpec
from stages.gateway.requests.state import RequestState
from stages.gateway.tokenizer_client import TokenizerClient
from stages.gateway.versions.loaded_versions import LoadedVersions

TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times. "
MAX_TOKENS = 8  # generated
TIMEOUT_S = 60.0
PRIORITY = 1_000  # above that of any key


class SelfTest:
    """One per gateway. `clock` is monotonic."""

    def __init__(
        self,
        loaded: LoadedVersions,
        tokenizer: TokenizerClient,
        relay: Relay,
        embedder: Embedder,
        clock: Callable[[], float],
    ) -> None:
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._relay = relay
        self._embedder = embedder
        self._clock = clock

    async def check(self, version: ModelVersion, reference: ModelVersion | None = None) -> None:
        """Raise `StarlingError` if the version cannot generate, or generates other tokens than `reference`.

        reference: the serving version; compared if it has the same file and KV type.
        """
        tokens = await self._answer(version)
        if reference is None or not self._loaded.is_ready(reference):
            return
        new, old = self._loaded.described[version.id], self._loaded.described[reference.id]
        if (new.digest, version.settings.kv_type) != (old.digest, reference.settings.kv_type):
            return
        expected = await self._answer(reference)
        if tokens != expected:
            raise InferenceError(
                f"the self-test of {version.id} gave {tokens}, and {reference.id}, which is of the same file, "
                f"gave {expected}"
            )

    async def _answer(self, version: ModelVersion) -> tuple[float, ...]:
        generates = self._loaded.described[version.id].generates
        return await (self._generate(version) if generates else self._embed(version))

    async def _embed(self, version: ModelVersion) -> tuple[float, ...]:
        prompt = (await self._tokenizer.encode(version.id, TEXT)).tokens[:MAX_TOKENS] or (0,)
        deadline = self._clock() + TIMEOUT_S
        call = EmbeddingCall(version.name, version.id, "", PRIORITY, "mean", deadline)
        (vector,) = await self._embedder.pool(call, [array("i", prompt).tobytes()])
        values = tuple(array("f", vector))
        if not values or not all(map(math.isfinite, values)):
            raise InferenceError(f"the self-test of {version.id} got a vector with values that are not finite")
        return values

    async def _generate(self, version: ModelVersion) -> tuple[int, ...]:
        described, bounds = self._loaded.described[version.id], self._loaded.bounds(version)
        prompt = (await self._tokenizer.encode(version.id, TEXT)).tokens or (0,)
        n = max(1, min(MAX_TOKENS, bounds.max_output_tokens or MAX_TOKENS, bounds.context // 2))
        max_prompt = min(bounds.context - n, bounds.max_prompt_tokens or bounds.context)
        sampling = Sampling(temperature=0.0, logprobs=0, ignore_eos=True)
        spec = RequestSpec(
            id=f"req-{secrets.token_hex(12)}",
            tenant="",
            model=version.name,
            digest=described.digest,
            numerics=NUMERICS,
            # A random salt, so that no cached page is used.
            generation=GenerationRequest(endpoint="selftest", model=version.name, cache_salt=secrets.token_hex(12)),
            seed=0,
            created=0,
            fingerprint="",
            deadline=0.0,
            priority=PRIORITY,
            prompts=(array("i", prompt[: max(1, max_prompt)]).tobytes(),),
            sequences=(SequenceSpec(0, 0, 0, n, sampling, ()),),
            version=version.id,
            tokenizer=described.tokenizer,
        )
        request = RequestState(spec, self._clock() + TIMEOUT_S, self._clock())
        request.is_probe = True
        (sequence,) = request.sequences
        request.sink = sink = WholeResponse()
        self._relay.open(request)
        try:
            await sink.over  # an error of the request is raised here
        except asyncio.CancelledError:
            self._relay.abandon(request)
            raise
        tokens = tuple(sequence.tokens)
        is_in_vocabulary = all(0 <= token < described.vocab_size for token in tokens)
        is_finite = all(math.isfinite(one.logprob) for one in sequence.logprobs)
        if len(tokens) != n or not is_in_vocabulary or not is_finite or len(sequence.logprobs) != n:
            raise InferenceError(
                f"the self-test of {version.id} requested {n} tokens and got {list(tokens)} with logprobs "
                f"{[one.logprob for one in sequence.logprobs]}"
            )
        return tokens
