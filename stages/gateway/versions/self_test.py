"""The self-test of a version, before requests are sent to it.

The stages that will serve it tokenize a fixed text and generate from it, or embed it.  If the serving version is of the
same file, its tokens (or its vector) must be equal.

A test that was passed is remembered (passed_tests.py), with the tokens after the first words of the text.  A version
of the same file, kernels and settings then computes those alone, in one step.  They must be the same with the same
logprobs: this finds weights that have been damaged or mapped wrongly since, and a stage that does not work.  Kernels
need no second test: they are the same objects (their bytes are in the key), which have computed a prompt and decode
steps right.  Other tokens, twice, fail the load: the same input gives the same bytes, so the memory or the file is
damaged.

The step does not read all weights: of an embedding that is not the output head it reads the rows of the prompt's
tokens, of tables by position those of its positions, of a mixture of experts the experts that the tokens are routed to,
and no adapter.  Of several worker groups one computes it, with the copies of weights that its ranks use.

That prompt is sent while the workers still start (`begin`): the scheduler has it when they are ready.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from array import array
from collections.abc import Callable
from typing import NamedTuple

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import PerformanceConfig
from pipeline.errors import InferenceError, ModelDamaged, StarlingError
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
from stages.gateway.versions.passed_tests import PassedTests, Probe, ProbeToken, key_of

log = logging.getLogger("starling.gateway.loader")

TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times. "
MAX_TOKENS = 8  # generated
# Of the prompt of a repeated test: one step, which reads most weights.  With one token alone no query and no key would
# count, because attention has nothing to choose from.
SHORT_TOKENS = 2
SHORT_MAX_TOKENS = 1  # generated then
TIMEOUT_S = 60.0
PRIORITY = 1_000  # above that of any key
# Errors of a short test that do not say how the version computes: it was sent too early, or waited too long.
TRANSIENT = ("MODEL_UNAVAILABLE", "MODEL_NOT_FOUND", "OVERLOADED", "TIMEOUT")


class Answer(NamedTuple):
    """What a version has computed, and the attachment of the worker group that did; 0: not known."""

    probe: Probe
    attachment: int


EarlyProbe = asyncio.Task[Answer]  # the short test of a version that may not be ready yet


class SelfTest:
    """One per gateway. `clock` is monotonic."""

    def __init__(
        self,
        loaded: LoadedVersions,
        tokenizer: TokenizerClient,
        relay: Relay,
        embedder: Embedder,
        clock: Callable[[], float],
        passed: PassedTests,
        performance: PerformanceConfig,
    ) -> None:
        self._performance = performance
        self._passed = passed
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._relay = relay
        self._embedder = embedder
        self._clock = clock

    def begin(self, version: ModelVersion, reference: ModelVersion | None = None) -> EarlyProbe | None:
        """Ask for the answer to the short test before the version is ready; for `check`, or to be cancelled.

        None: there is no short test, because the version embeds, or is compared with `reference`.
        """
        if not self._loaded.described[version.id].generates or self._is_comparable(version, reference):
            return None

        async def ask() -> Answer:
            return await self._generate(version, (await self._prompt(version))[:SHORT_TOKENS], SHORT_MAX_TOKENS)

        early = asyncio.get_running_loop().create_task(ask())
        early.add_done_callback(lambda task: task.cancelled() or task.exception())  # `check` may not come
        return early

    async def check(
        self, version: ModelVersion, reference: ModelVersion | None = None, early: EarlyProbe | None = None
    ) -> None:
        """Raise `StarlingError` if the version cannot generate, or generates other tokens than `reference`.

        reference: the serving version; compared if it has the same file and KV type.  early: from `begin`.
        """
        if reference is None or not self._is_comparable(version, reference):
            await self._answer(version, may_be_short=True, early=early)
            return
        tokens, expected = await self._answer(version), await self._answer(reference)
        if tokens != expected:
            raise InferenceError(
                f"the self-test of {version.id} gave {tokens}, and {reference.id}, which is of the same file, "
                f"gave {expected}"
            )

    def _is_comparable(self, version: ModelVersion, reference: ModelVersion | None) -> bool:
        if reference is None or not self._loaded.is_ready(reference):
            return False
        new, old = self._loaded.described[version.id], self._loaded.described[reference.id]
        ours, theirs = ((one.digest, one.revision) for one in (new, old))
        return (ours, version.settings.kv_type) == (theirs, reference.settings.kv_type)

    async def _prompt(self, version: ModelVersion) -> tuple[int, ...]:
        return (await self._tokenizer.encode(version.id, TEXT)).tokens or (0,)

    async def _answer(
        self, version: ModelVersion, may_be_short: bool = False, early: EarlyProbe | None = None
    ) -> tuple[float, ...]:
        """The tokens or the vector. `may_be_short`: only those of a short test, if one is known.

        Raises `ModelDamaged` if it gives others.
        """
        prompt = await self._prompt(version)
        if not self._loaded.described[version.id].generates:
            return await self._embed(version, prompt[:MAX_TOKENS])
        key = self._key(version, prompt)
        known = self._passed.find(key) if may_be_short and key else None
        if known is not None:
            return await self._repeat(version, prompt, known, early)
        answer = (await self._generate(version, prompt, MAX_TOKENS)).probe
        if may_be_short and key:
            try:
                self._passed.add(key, await self._short(version, prompt, early))
            except StarlingError as error:
                if error.code not in TRANSIENT:
                    raise
                # The version has passed: only the next load repeats all of it.
                log.warning("a passed self-test is not kept", extra={"version": version.id, "reason": error.message})
        return tuple(one.token for one in answer)

    async def _short(self, version: ModelVersion, prompt: tuple[int, ...], early: EarlyProbe | None) -> Probe:
        """The answer to the short test. Raises `InferenceError` if its computation failed."""
        if early is not None:
            try:
                found = await early
                state = self._loaded.states.get(version.id)
                if state is not None and found.attachment in state.attachments and found.attachment:
                    return found.probe
                # Workers that have been replaced may have given it.
                log.info("repeating the self-test", extra={"version": version.id, "reason": "its workers are others"})
            except StarlingError as error:
                if error.code not in TRANSIENT:
                    raise
                # Its time began before the version was ready.
                log.info("repeating the self-test", extra={"version": version.id, "reason": error.message})
        return (await self._generate(version, prompt[:SHORT_TOKENS], SHORT_MAX_TOKENS)).probe

    async def _repeat(
        self, version: ModelVersion, prompt: tuple[int, ...], known: Probe, early: EarlyProbe | None
    ) -> tuple[float, ...]:
        """The tokens of the short test, which must be `known`."""
        for attempt in (early, None):
            found = await self._short(version, prompt, attempt)
            if found == known:
                return tuple(one.token for one in found)
            facts = {"version": version.id, "tokens": found, "expected": known}
            log.warning("the self-test gave other tokens than before", extra=facts)
        raise ModelDamaged(
            f"the self-test of {version.id} gave {_text(found)}, and {_text(known)} when the same file passed it "
            f"before: its file or this machine's memory is damaged; run `starling verify {version.name}`. If both are "
            "good, remove self-tests.json in the state directory while the server is stopped",
            param="model",
        )

    def _key(self, version: ModelVersion, prompt: tuple[int, ...]) -> str:
        """The key of its test; "" if its worker has not named its kernels."""
        state = self._loaded.states.get(version.id)
        if state is None or not state.kernels:
            return ""
        settings, bounds = version.settings, self._loaded.bounds(version)
        return key_of(
            digest=self._loaded.described[version.id].digest,
            kernels=state.kernels,
            numerics=NUMERICS,
            adapters=state.adapters,
            kv_type=settings.kv_type,
            page_tokens=settings.page_tokens,
            ranks=state.ranks,
            nodes=state.nodes,
            weight_copies=self._performance.weight_copies,
            use_mmap=self._performance.use_mmap,
            cpus=settings.cpus,
            prompt=prompt,
            tokens=(MAX_TOKENS, SHORT_TOKENS, SHORT_MAX_TOKENS),
            bounds=(bounds.context, bounds.max_output_tokens, bounds.max_prompt_tokens),
        )

    async def _embed(self, version: ModelVersion, prompt: tuple[int, ...]) -> tuple[float, ...]:
        deadline = self._clock() + TIMEOUT_S
        call = EmbeddingCall(version.name, version.id, "", PRIORITY, "mean", deadline)
        (vector,) = await self._embedder.pool(call, [array("i", prompt).tobytes()])
        values = tuple(array("f", vector))
        if not values or not all(map(math.isfinite, values)):
            raise InferenceError(f"the self-test of {version.id} got a vector with values that are not finite")
        return values

    async def _generate(self, version: ModelVersion, prompt: tuple[int, ...], most: int) -> Answer:
        """Up to `most` tokens after the prompt."""
        described, bounds = self._loaded.described[version.id], self._loaded.bounds(version)
        n = max(1, min(most, bounds.max_output_tokens or most, bounds.context // 2))
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
        logprobs = (one.logprob for one in sequence.logprobs)
        return Answer(tuple(ProbeToken(*one) for one in zip(tokens, logprobs, strict=True)), sequence.attachment)


def _text(probe: Probe) -> str:
    return ", ".join(f"token {one.token} (logprob {one.logprob:.9g})" for one in probe)
