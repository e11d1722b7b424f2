"""The fields that all endpoints for text generation share, with their bounds.

The bounds hold for every model.  A model's own bounds (context, vocabulary) are checked at admission.
"""

from __future__ import annotations

from typing import Any

from pipeline.api.constraint_fields import CONSTRAINT_FIELDS
from pipeline.api.fields import (
    Reader,
    flag,
    integer,
    invalid_value,
    number,
    object_schema,
    read_fields,
    strings,
    text,
    token_ids,
)
from pipeline.api.json_schema import array_of, described, schema_of
from pipeline.config.schema import MAX_DRAFT_TOKENS
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Sampling
from shm.step_ring import DEFAULT_ORDER, MAX_BIAS

MAX_CHOICES = 16  # n
MAX_PROMPTS = 64  # in one request
MAX_SEQUENCES = 128  # prompts x n
MAX_OUTPUT_TOKENS = 1_048_576  # in the field; the model's context is the actual bound
MAX_STOP_STRINGS = 4  # OpenAI's bound
MAX_STOP_CHARACTERS = 256
MAX_PROMPT_IDS = 1_000_000  # in the field; the model's context is the actual bound
MAX_SALT_CHARACTERS = 128
MAX_MODEL_CHARACTERS = 256  # of a model's name
MIN_REPETITION_PENALTY = 0.01
MAX_TTL_S = 30 * 86_400
U64 = 1 << 64


_SEED = integer(-(1 << 63), U64 - 1)


@described(schema_of(_SEED))
def read_seed(value: Any, name: str) -> int:
    """Read a 64-bit number, signed or unsigned, modulo 2**64."""
    return int(_SEED(value, name)) % U64


@described({"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARACTERS, "pattern": "^[^\\u0000]*$"})
def read_salt(value: Any, name: str) -> str:
    """Read a cache salt. It has no NUL: that separates it from the tenant's salt."""
    salt: str = text(MAX_SALT_CHARACTERS, empty=False)(value, name)
    if "\0" in salt:
        raise InvalidRequest(f"{name} has a NUL character; leave it out", name)
    return salt


@described({**array_of({"enum": list(DEFAULT_ORDER)}, least=1), "uniqueItems": True, "contains": {"const": "mask"}})
def read_order(value: Any, name: str) -> tuple[str, ...]:
    """Read sampler steps in the order in which to apply them; a missing step is not applied."""
    steps = ", ".join(DEFAULT_ORDER)
    if not isinstance(value, list) or not value:
        raise invalid_value(name, value, f"an array of sampler steps ({steps})")
    for index, step in enumerate(value):
        if not isinstance(step, str) or step not in DEFAULT_ORDER:
            raise invalid_value(f"{name}[{index}]", step, f"one of {steps}")
        if step in value[:index]:
            raise InvalidRequest(f"{name} has {step!r} twice; a step is applied once", name)
    if "mask" not in value:
        raise InvalidRequest(f'{name} leaves out "mask", which is always applied; add it', name)
    return tuple(value)


_BIAS = number(-100, 100)


@described(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": schema_of(_BIAS),
        "maxProperties": MAX_BIAS,
    }
)
def read_logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    """Read `{"token id": bias}`, as in OpenAI's API, into pairs sorted by token id."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, "an object from token ids to numbers from -100 to 100")
    if len(value) > MAX_BIAS:
        raise InvalidRequest(f"{name} has {len(value)} entries; at most {MAX_BIAS} are allowed", name)
    pairs: dict[int, float] = {}
    for key, item in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**31):
            raise InvalidRequest(f"{name} has the key {key[:32]!r}; keys must be token ids", name)
        if int(key) in pairs:
            raise InvalidRequest(f"{name} gives token {int(key)} twice; give it once", name)
        pairs[int(key)] = _BIAS(item, f"{name}.{key}")
    return tuple(sorted(pairs.items()))


_STREAM_OPTIONS: dict[str, Reader] = {"include_usage": flag}


@described(object_schema(_STREAM_OPTIONS))
def read_stream_options(value: Any, name: str) -> dict[str, Any]:
    """Read OpenAI's `stream_options`."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, "an object")
    return read_fields(value, _STREAM_OPTIONS, within=name)


# The fields of `Sampling` that every endpoint accepts; those of OpenAI's API have its bounds.
_SAMPLER_FIELDS: dict[str, Reader] = {
    "temperature": number(0, 2, hint="0 is greedy"),
    "top_p": number(0, 1, above=True, hint="1 switches it off"),
    "top_k": integer(0, 1_000_000, hint="0 switches it off"),
    # A smaller one overflows the logits.
    "repetition_penalty": number(MIN_REPETITION_PENALTY, 10, hint="1 switches it off"),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "min_tokens": integer(0, MAX_OUTPUT_TOKENS),
    "ignore_eos": flag,
    "logit_bias": read_logit_bias,
    "order": read_order,
}

COMMON_FIELDS: dict[str, Reader] = {
    **_SAMPLER_FIELDS,
    **CONSTRAINT_FIELDS,
    "seed": read_seed,
    "model": text(MAX_MODEL_CHARACTERS, empty=False),
    "n": integer(1, MAX_CHOICES),
    "stop": strings(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
    "stop_token_ids": token_ids(16),
    "stream": flag,
    "skip_special_tokens": flag,
    "cache_salt": read_salt,
    "speculate": integer(0, MAX_DRAFT_TOKENS, hint="0 switches it off"),
}


def sampling_of(values: dict[str, Any]) -> Sampling:
    """Return the sampling parameters among the values that were read with `COMMON_FIELDS`."""
    return Sampling(**{name: values[name] for name in _SAMPLER_FIELDS if name in values})
