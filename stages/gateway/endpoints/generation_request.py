"""What a generation endpoint makes of a valid body, and the fields that all of them share.

`GenerationRequest` is the common form: `chat.py`, `completions.py` and `generate.py` fill it in, admission turns it
into sequences.  Nothing here depends on a model: what does is checked at admission.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Sampling
from shm.step_ring import DEFAULT_ORDER
from stages.gateway.http.fields import Reader, flag, integer, number, read_fields, refuse, strings, text, token_ids

MAX_CHOICES = 16  # n
MAX_PROMPTS = 64  # in one request
MAX_SEQUENCES = 128  # prompts x n
MAX_OUTPUT_TOKENS = 1_048_576  # of the field; the model's context is the real bound
MAX_STOP_STRINGS = 4  # OpenAI's bound
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 300  # as in Sampling.logit_bias
MAX_TOP_LOGPROBS = 20
MAX_SPECULATE = 16  # draft tokens in a step, as in models.*.speculate
MAX_PROMPT_IDS = 1_000_000  # of the field; the model's context is the real bound
MAX_TTL_S = 30 * 86_400
U64 = 1 << 64

TextOrIds = str | tuple[int, ...]


class Turn(msgspec.Struct, array_like=True):
    """Of a session, once kv has begun it."""

    session: str
    number: int  # 0: it is over and need not be kept again
    base: int  # tokens that the session held before


class GenerationRequest(msgspec.Struct, kw_only=True):
    """A validated request for text."""

    endpoint: str  # as metrics and logs name it
    model: str  # "": the first one
    prompts: list[TextOrIds] = []
    messages: list[dict[str, Any]] | None = None  # of a chat: instead of prompts
    n: int = 1
    max_tokens: int | None = None  # None: what the context leaves
    max_tokens_field: str = "max_tokens"  # for error messages
    seed: int | None = None  # None: drawn
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special: bool = True
    cache_salt: str = ""  # prompts share cached pages only with others of the same salt
    speculate: int = 0  # most draft tokens in a step; 0: as the model is configured, -1: none
    session_id: str | None = None  # "": a new one
    creates_session: bool = False  # when there is none of that id
    session_ttl_s: int | None = None  # of a new one; 0: never closed by itself; None: as configured
    turn: Turn | None = None  # filled in at admission

    @property
    def prompt_field(self) -> str:
        return "prompt" if self.messages is None else "messages"


def read_seed(value: Any, name: str) -> int:
    """Any 64-bit number, signed or not; taken modulo 2**64."""
    return int(integer(-(1 << 63), U64 - 1)(value, name)) % U64


def read_salt(value: Any, name: str) -> str:
    salt: str = text(128, empty=False)(value, name)
    if "\0" in salt:
        raise InvalidRequest(f"{name} has a NUL character; leave it out", name)
    return salt


def read_order(value: Any, name: str) -> tuple[str, ...]:
    """Sampler steps in the order they are to be applied; one that is left out is not applied."""
    steps = ", ".join(DEFAULT_ORDER)
    if not isinstance(value, list) or not value:
        raise refuse(name, value, f"an array of sampler steps ({steps})")
    for index, step in enumerate(value):
        if not isinstance(step, str) or step not in DEFAULT_ORDER:
            raise refuse(f"{name}[{index}]", step, f"one of {steps}")
        if step in value[:index]:
            raise InvalidRequest(f"{name} has {step!r} twice; a step is applied once", name)
    if "mask" not in value:
        raise InvalidRequest(f'{name} leaves out "mask", which is always applied; add it', name)
    return tuple(value)


def read_logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    """`{"token id": bias}`, as OpenAI has it."""
    if not isinstance(value, dict):
        raise refuse(name, value, "an object from token ids to numbers from -100 to 100")
    if len(value) > MAX_BIASES:
        raise InvalidRequest(f"{name} has {len(value)} entries; at most {MAX_BIASES} are taken", name)
    bias = number(-100, 100)
    pairs: dict[int, float] = {}
    for key, item in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**31):
            raise InvalidRequest(f"{name} has the key {key[:32]!r}; keys must be token ids", name)
        if int(key) in pairs:
            raise InvalidRequest(f"{name} gives token {int(key)} twice; give it once", name)
        pairs[int(key)] = bias(item, f"{name}.{key}")
    return tuple(sorted(pairs.items()))


def read_stream_options(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    return read_fields(value, {"include_usage": flag}, within=name)


# Sampling parameters that every endpoint takes; OpenAI's own ones within OpenAI's bounds.
SAMPLING_FIELDS: dict[str, Reader] = {
    "temperature": number(0, 2, hint="0 is greedy"),
    "top_p": number(0, 1, above=True, hint="1 switches it off"),
    "top_k": integer(0, 1_000_000, hint="0 switches it off"),
    "repetition_penalty": number(0, 10, above=True, hint="1 switches it off"),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "min_tokens": integer(0, MAX_OUTPUT_TOKENS),
    "ignore_eos": flag,
    "logit_bias": read_logit_bias,
    "order": read_order,
    "seed": read_seed,
}

COMMON_FIELDS: dict[str, Reader] = {
    **SAMPLING_FIELDS,
    "model": text(256, empty=False),
    "n": integer(1, MAX_CHOICES),
    "stop": strings(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
    "stop_token_ids": token_ids(16),
    "stream": flag,
    "skip_special_tokens": flag,
    "cache_salt": read_salt,
    "speculate": integer(0, MAX_SPECULATE, hint="0 switches it off"),
}


def common(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `GenerationRequest` from the fields of `COMMON_FIELDS`."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "min_tokens",
        "ignore_eos",
        "logit_bias",
        "order",
    )
    return {
        "model": values.get("model", ""),
        "n": values.get("n", 1),
        "seed": values.get("seed"),
        "sampling": Sampling(**{name: values[name] for name in names if name in values}),
        "stop": values.get("stop", ()),
        "stop_token_ids": values.get("stop_token_ids", ()),
        "stream": values.get("stream", False),
        "skip_special": values.get("skip_special_tokens", True),
        "cache_salt": values.get("cache_salt", ""),
        "speculate": values["speculate"] or -1 if "speculate" in values else 0,
    }


def check_together(ask: GenerationRequest) -> GenerationRequest:
    """What no field alone can say."""
    if ask.max_tokens is not None and ask.sampling.min_tokens > ask.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {ask.sampling.min_tokens} and {ask.max_tokens_field} {ask.max_tokens}; "
            f"min_tokens must not be the larger one",
            "min_tokens",
        )
    total = max(1, len(ask.prompts)) * ask.n
    if total > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(ask.prompts)} prompts with n = {ask.n} are {total} texts; one request may ask for "
            f"{MAX_SEQUENCES}: send several requests",
            "n",
        )
    return ask
