"""What a request asks for, fixed at admission: everything that determines its answer and how it is sent.

`RequestSpec` is the one description of an admitted request. The journal stores exactly this struct, `RequestState`
is built from it, and the replay buffer stores it without the prompts. A new field of a request is added here, at
the end and with a default, and nowhere else. Both structs are positional: fields are never reordered or removed.
"""

from __future__ import annotations

from typing import NewType

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.protocol.messages import Sampling
from stages.gateway.tracing.trace_context import TraceContext

ResponseKey = NewType("ResponseKey", bytes)  # SHA-256 over everything that determines an answer's bytes


MAX_TIME_S = 1e12  # s since 1970, of a deadline


class SequenceSpec(msgspec.Struct, array_like=True, frozen=True):
    """One sequence: a prompt and the number of a choice."""

    prompt: int  # index in `RequestSpec.prompts`, which holds equal prompts once
    prompt_index: int  # index of the prompt in the client's request
    choice: int  # of this prompt, from 0; the sampler draws from (seed, choice, position)
    max_tokens: int
    sampling: Sampling  # with the final seed
    stop_ids: tuple[int, ...]


class RequestSpec(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """An admitted request. `created` is in seconds since 1970, `deadline` too, by the steady clock."""

    id: str  # req-HEX
    tenant: str
    model: str  # the name that the client used, without the adapter's
    digest: str  # SHA-256 of the model's GGUF file, hex
    numerics: int  # version of the arithmetic
    generation: GenerationRequest  # without prompts and messages
    seed: int
    created: int
    fingerprint: str
    deadline: float
    priority: int = 0
    client_id: str = ""  # X-Request-Id; "": the client sent none
    prompts: tuple[bytes, ...] = ()  # token ids, i32 little-endian
    echoes: tuple[str, ...] = ()  # with `echo`: the text of each prompt
    sequences: tuple[SequenceSpec, ...] = ()
    version: str = ""  # id of the loaded version of the model
    tokenizer: str = ""  # digest of the version's tokenizer
    idempotency_key: str = ""  # "": the client sent none
    body_digest: bytes = b""  # SHA-256 of endpoint and body, with a key
    api_key_id: str = ""  # of the key file; "": a configured key, or none
    trace: TraceContext | None = None  # with `tracing.otlp`
    prediction: bytes = b""  # what the answers may be: token ids, i32 little-endian
    plugins: tuple[str, ...] = ()  # identities of the plugins that the answer's text goes through
    kv_revision: int = 0  # `Hyper.kv_revision` of the version: with another one the same file gives other tokens

    @property
    def shown_model(self) -> str:
        """The model's name in answers: `MODEL`, or `MODEL:ADAPTER`."""
        adapter = self.generation.adapter
        return f"{self.model}:{adapter.name}" if adapter else self.model

    @property
    def hex(self) -> str:
        """The id without its prefix, for the ids of OpenAI's objects."""
        return self.id.removeprefix("req-")

    @property
    def vocabulary(self) -> str:
        """Key of the vocabulary of its token ids. Versions of a model may share one."""
        return self.tokenizer or self.version

    @property
    def is_consistent(self) -> bool:
        """Whether a request can be made of it: a journal's record may come from another release or a bad disk."""
        n_prompts = len(self.prompts) or 1
        return abs(self.deadline) < MAX_TIME_S and all(0 <= one.prompt < n_prompts for one in self.sequences)

    def prompt_of(self, sequence: SequenceSpec) -> bytes:
        """Token ids of the sequence's prompt, i32 little-endian; b"" after `without_prompts`."""
        return self.prompts[sequence.prompt] if self.prompts else b""

    def without_prompts(self) -> RequestSpec:
        """The part that readers of an ended request need: no prompts unless it shows them, no sampling parameters."""
        has_scores = self.generation.prompt_logprobs is not msgspec.UNSET
        sequences = tuple(
            msgspec.structs.replace(sequence, sampling=_NO_SAMPLING, stop_ids=()) for sequence in self.sequences
        )
        prompts = self.prompts if has_scores else ()
        return msgspec.structs.replace(self, prompts=prompts, sequences=sequences, prediction=b"")


_NO_SAMPLING = Sampling()
