"""The fields that all endpoints for text generation share, with their bounds.

The bounds hold for every model.  A model's own bounds (context, vocabulary) are checked at admission.
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.api.constraint_fields import CONSTRAINT_FIELDS
from pipeline.api.fields import (
    Reader,
    Unsupported,
    flag,
    integer,
    invalid_value,
    number,
    object_schema,
    one_of,
    read_fields,
    strings,
    text,
    token_ids,
)
from pipeline.api.json_schema import array_of, described, schema_of, string
from pipeline.config.schema import MAX_DRAFT_TOKENS
from pipeline.durations import FORM, seconds_of
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Sampling
from shm.sampler_steps import DEFAULT_ORDER
from shm.step_ring import MAX_BIAS, MAX_TOP

MAX_CHOICES = 16  # n
MAX_PROMPTS = 64  # in one request
MAX_SEQUENCES = 128  # prompts x n
MAX_OUTPUT_TOKENS = 1_048_576  # in the field; the model's context is the actual bound
MAX_STOP_STRINGS = 4  # OpenAI's bound
MAX_STOP_CHARACTERS = 256
MAX_PROMPT_IDS = 1_000_000  # in the field; the model's context is the actual bound
MAX_SALT_CHARACTERS = 128
MAX_PRIORITY = 100  # and its negative; as of API keys
MAX_MODEL_CHARACTERS = 256  # of a model's name
MIN_REPETITION_PENALTY = 0.01
MAX_TTL_S = 30 * 86_400
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_TEXT = 16, 64, 512  # members, characters of a name and of a text
MAX_BREAKERS = 16  # sequence breakers of DRY
MAX_BREAKER_CHARACTERS = 64
U64 = 1 << 64


read_prompt_logprobs: Reader = integer(0, MAX_TOP)  # of each token of the prompt

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


@described(array_of(string(MAX_BREAKER_CHARACTERS, least=1), most=MAX_BREAKERS))
def read_breakers(value: Any, name: str) -> tuple[str, ...]:
    """Read the sequence breakers of DRY: an array of texts, perhaps empty."""
    if not isinstance(value, list):
        raise invalid_value(name, value, f"an array of up to {MAX_BREAKERS} strings")
    breakers: tuple[str, ...] = strings(MAX_BREAKERS, MAX_BREAKER_CHARACTERS)(value, name)
    return breakers


@described({"type": ["number", "string"], "maxLength": 40})
def read_keep_alive(value: Any, name: str) -> float:
    """Read how long a model stays loaded, in s; -1: for good."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise invalid_value(name, value, FORM)
    try:
        seconds = seconds_of(value)
    except (ValueError, OverflowError):
        raise invalid_value(name, value, FORM) from None
    return -1.0 if seconds == math.inf else seconds


_SIGMAS = number(-1, 1000, hint="0 and -1 switch it off")


@described(schema_of(_SIGMAS))
def read_sigmas(value: Any, name: str) -> float:
    """Read a number of standard deviations; a negative one is 0."""
    return max(0.0, float(_SIGMAS(value, name)))


@described(
    {
        "type": "object",
        "additionalProperties": string(MAX_METADATA_TEXT),
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_METADATA_KEY},
    }
)
def read_metadata(value: Any, name: str) -> None:
    """Read OpenAI's `metadata`, which has no effect: up to 16 names and texts."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, "an object of up to 16 texts by name")
    if len(value) > MAX_METADATA:
        raise InvalidRequest(f"{name} has {len(value)} members; at most {MAX_METADATA} are allowed", name)
    for key, item in value.items():
        if len(key) > MAX_METADATA_KEY:
            raise InvalidRequest(f"{name} has a name of {len(key)} characters; at most {MAX_METADATA_KEY}", name)
        text(MAX_METADATA_TEXT)(item, f"{name}.{key}")


_STREAM_OPTIONS: dict[str, Reader] = {"include_usage": flag}
_UNSUPPORTED_IN_STREAM_OPTIONS = {
    "include_obfuscation": Unsupported(False, hint="events are not padded"),
    "continuous_usage_stats": Unsupported(False, hint="the last event has the usage"),
}


@described(object_schema(_STREAM_OPTIONS, unsupported=_UNSUPPORTED_IN_STREAM_OPTIONS))
def read_stream_options(value: Any, name: str) -> dict[str, Any]:
    """Read OpenAI's `stream_options`."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, "an object")
    return read_fields(value, _STREAM_OPTIONS, unsupported=_UNSUPPORTED_IN_STREAM_OPTIONS, within=name)


# The fields of `Sampling` that every endpoint accepts; those of OpenAI's API have its bounds.
SAMPLER_FIELDS: dict[str, Reader] = {
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
    "min_p": number(0, 1, hint="0 switches it off"),
    "typical_p": number(0, 1, above=True, hint="1 switches it off"),
    "top_n_sigma": read_sigmas,
    "dry_multiplier": number(0, 100, hint="0 switches DRY off"),
    "dry_base": number(1, 100),
    "dry_allowed_length": integer(0, 1_000_000),
    "dry_penalty_last_n": integer(-1, 1_000_000_000, hint="-1: all tokens"),
    "dry_sequence_breakers": read_breakers,
    "xtc_probability": number(0, 1, hint="0 switches XTC off"),
    "xtc_threshold": number(0, 1, hint="above 0.5 it has no effect"),
}

# Fields of other servers that none of the endpoints has; the values are those that switch mirostat off.
COMMON_UNSUPPORTED = {
    "mirostat": Unsupported(0, 0.0, hint="use min_p, typical_p or top_n_sigma"),
    "mirostat_tau": Unsupported(5, 5.0, hint="it belongs to mirostat"),
    "mirostat_eta": Unsupported(0.1, hint="it belongs to mirostat"),
}

_CACHE_OPTIONS: dict[str, Reader] = {"mode": one_of("implicit", "explicit"), "ttl": text(16)}


@described(object_schema(_CACHE_OPTIONS))
def read_cache_options(value: Any, name: str) -> None:
    """Read OpenAI's `prompt_cache_options`, which have no effect: prefixes are cached in any case."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, "an object")
    read_fields(value, _CACHE_OPTIONS, within=name)


# Hints of OpenAI's API: accepted, checked, and without effect on the text.
HINT_FIELDS: dict[str, Reader] = {
    "user": text(512),
    "metadata": read_metadata,
    "safety_identifier": text(512),
    "prompt_cache_key": text(512),  # prefixes are cached by their tokens
    "prompt_cache_options": read_cache_options,
    "prompt_cache_retention": one_of("in_memory", "in-memory", "24h"),
    "service_tier": one_of("auto", "default", "flex", "priority", "scale", "fast", "ultrafast"),
}

COMMON_FIELDS: dict[str, Reader] = {
    **SAMPLER_FIELDS,
    **CONSTRAINT_FIELDS,
    "seed": read_seed,
    "model": text(MAX_MODEL_CHARACTERS, empty=False),
    "n": integer(1, MAX_CHOICES),
    "stop": strings(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
    "stop_token_ids": token_ids(16),
    "stream": flag,
    "skip_special_tokens": flag,
    "cache_salt": read_salt,
    "keep_alive": read_keep_alive,
    "speculate": integer(0, MAX_DRAFT_TOKENS, hint="0 switches it off"),
    "priority": integer(-MAX_PRIORITY, MAX_PRIORITY, hint="the lower the earlier"),
}


# The parameters of each sampler step that is not always applied.
_STEP_FIELDS = {
    "repetition": ("repetition_penalty",),
    "dry": ("dry_multiplier",),
    "temperature": ("temperature",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typical_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
    "penalties": ("frequency_penalty", "presence_penalty"),
}


def check_configured_order(sampling: Sampling, order: tuple[str, ...]) -> None:
    """Raise `InvalidRequest` for a parameter whose step the configured `order` leaves out. An empty one has all.

    A temperature of 0 is no step: it takes the likeliest token, whatever the order.
    """
    neutral = Sampling()
    for step, names in _STEP_FIELDS.items():
        for name in names if order and step not in order else ():
            value = getattr(sampling, name)
            if value != getattr(neutral, name) and not (name == "temperature" and value == 0):
                raise InvalidRequest(
                    f"{name} is {value:g}, and the model's sampler_order in the configuration leaves its step out; "
                    f"leave {name} out, or send the order of the steps with {step} in it",
                    name,
                )


def sampling_of(values: dict[str, Any]) -> Sampling:
    """Return the sampling parameters among the values that were read with `COMMON_FIELDS`."""
    return Sampling(**{name: value for name, value in values.items() if name in SAMPLER_FIELDS})
