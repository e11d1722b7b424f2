"""What a caller of the in-process engine submits, read and checked as the gateway does."""

from __future__ import annotations

import operator
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from pipeline.api.generation_fields import check_configured_order
from pipeline.api.requests import generate
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import ModelConfig
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Sampling, Submit
from stages.gateway.admission.lengths import Bounds, output_budget
from stages.gateway.admission.prompts import check_ids
from stages.gateway.requests.sequence_breakers import breakers_of
from stages.tokenizer.vocabulary import Vocabulary

SERVER_FIELDS = ("model", "stream", "session_id", "create_session", "session_ttl_s", "keep_alive", "prompt_logprobs")
MAX_TIMEOUT_S = 86_400  # of `server.request_timeout_ms`, too


def read_request(prompt: str | Sequence[int], fields: Mapping[str, Any]) -> GenerationRequest:
    """The fields of `POST /v1/generate`. Raises `InvalidRequest`, also for those that only a server has."""
    for name in SERVER_FIELDS:
        if name in fields:
            raise InvalidRequest(f"{name} is a field of the HTTP server; leave it out of submit", name)
    given = prompt if isinstance(prompt, str) else _token_ids(prompt)
    parsed = generate.read({"prompt": given, **fields})
    if (n := len(parsed.prompts)) != 1:
        raise InvalidRequest(f"prompt has {n} prompts; one submit makes one text: submit {n} times", "prompt")
    if parsed.n != 1:
        raise InvalidRequest(f"n is {parsed.n}; one submit makes one text: submit {parsed.n} times", "n")
    if parsed.constraint:  # it needs processes of its own
        name = parsed.constraint.field
        raise InvalidRequest(f"{name} constrains the output, which only a server does; leave it out", name)
    return parsed


def make_frame(
    parsed: GenerationRequest, vocabulary: Vocabulary, model: ModelConfig, bounds: Bounds, timeout_s: float | None
) -> Submit:
    """The frame for the scheduler, with a new id. Raises `InvalidRequest`."""
    [given] = parsed.prompts
    tokens = vocabulary.encode(given, parse_special=False, add_bos=True) if isinstance(given, str) else given
    check_ids(parsed, [tuple(tokens)], vocabulary.size)
    budget = output_budget(len(tokens), parsed.max_tokens, bounds, "prompt", "max_tokens")
    seed = secrets.randbits(53) if parsed.seed is None else parsed.seed
    if not (order := parsed.sampling.order):
        order = model.sampler_order
        check_configured_order(parsed.sampling, order)
    sampling: Sampling = msgspec.structs.replace(parsed.sampling, seed=seed, order=order)
    breakers = b""
    if sampling.dry_multiplier:
        pieces = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
        breakers = breakers_of(pieces, sampling.dry_sequence_breakers).checked(sampling.dry_sequence_breakers).mask
    eos_ids = () if sampling.ignore_eos else vocabulary.eos_ids
    request_id = f"req-{secrets.token_hex(12)}"
    return Submit(
        sequence=f"{request_id}/0",
        request=request_id,
        model=model.name,
        tenant="",
        prompt=array("i", tokens).tobytes(),
        max_tokens=budget,
        sampling=sampling,
        stop_ids=tuple(dict.fromkeys((*eos_ids, *parsed.stop_token_ids))),
        deadline_ms=_deadline_ms(timeout_s),
        priority=-(parsed.priority or 0),
        cache_salt=parsed.cache_salt,
        speculate=parsed.speculate,
        breakers=breakers,
    )


def _deadline_ms(timeout_s: float | None) -> int:
    """As in `Submit`: 0 for no deadline."""
    if timeout_s is None:
        return 0
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s is {timeout_s!r}: expected seconds, above 0 and at most {MAX_TIMEOUT_S}, or None for no limit",
            "timeout_s",
        )
    return max(1, round(1000 * timeout_s))


def _token_ids(prompt: object) -> list[object]:
    """A prompt that is no text. Raises `InvalidRequest` for one that has numbers and is no sequence of token ids."""
    is_bytes = isinstance(prompt, bytes | bytearray) or (isinstance(prompt, memoryview) and prompt.itemsize == 1)
    if is_bytes or isinstance(prompt, Mapping | Set) or not isinstance(prompt, Iterable):
        remedy = "; decode it" if is_bytes else ""
        raise InvalidRequest(
            f"prompt is of type {type(prompt).__name__}: expected a text or a sequence of token ids{remedy}", "prompt"
        )
    return [_plain(token) for token in prompt]


def _plain(token: object) -> object:
    """A whole number of any library as Python's; what else a prompt holds is refused like any wrong value."""
    if isinstance(token, bool):
        return token
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        return token
