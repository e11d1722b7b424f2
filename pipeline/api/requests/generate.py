"""POST /v1/generate: the server's own endpoint. One prompt, with every feature of the server.

Request:
    {"model": "...",                     default: the first model
     "prompt": "text" | [ids],           required; the model's BOS token is added to a text, not to ids
                                         or an array of up to 64 of them: each has its choices
     "max_tokens": 100,                  default: as many as the context leaves; 0: none
     "temperature": 1, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "frequency_penalty": 0,
     "presence_penalty": 0, "logit_bias": {"id": bias}, "order": ["mask", ...], "seed": 7,
     "min_p": 0, "typical_p": 1, "top_n_sigma": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
     "dry_penalty_last_n": -1, "dry_sequence_breakers": [texts], "xtc_probability": 0, "xtc_threshold": 0.1,
     "min_tokens": 0, "ignore_eos": false, "stop": "text" | [texts], "stop_token_ids": [ids],
     "cache_salt": "...",                cached prompts are shared only with the same salt
     "keep_alive": "5m",                 how long the model stays loaded after the request; default: as configured
     "speculate": 4,                     the most draft tokens in a step, 0: none; does not change the text
     "n": 1, "logprobs": 5,              of the sampled token and of the 5 most likely
     "prompt_logprobs": 5,               of each token of the prompt, and of the 5 most likely in its place
     "skip_special_tokens": true, "stream": false,
     "session_id": "...",                the prompt continues this session; "": a new session
     "create_session": false,            creates the session if it does not exist
     "session_ttl_s": 3600}              of a new session, since its last use; 0: no limit; default: as configured
"""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import (
    FieldTable,
    Reader,
    Unsupported,
    flag,
    integer,
    text,
)
from pipeline.api.generation_fields import (
    COMMON_FIELDS,
    COMMON_UNSUPPORTED,
    HINT_FIELDS,
    MAX_OUTPUT_TOKENS,
    MAX_TTL_S,
    read_prompt_logprobs,
)
from pipeline.api.requests.generation_request import (
    GenerationRequest,
    check_combination,
    common_arguments,
    with_logprobs,
)
from pipeline.api.requests.prompt_field import read_prompts
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import MAX_SESSION_ID
from shm.step_ring import MAX_TOP

UNSUPPORTED = {
    **COMMON_UNSUPPORTED,
    "best_of": Unsupported(1, hint="use n"),
}

FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "prompt": read_prompts,
    "max_tokens": integer(0, MAX_OUTPUT_TOKENS, hint="0 generates nothing"),
    "logprobs": integer(0, MAX_TOP),
    "prompt_logprobs": read_prompt_logprobs,
    **HINT_FIELDS,
    "session_id": text(MAX_SESSION_ID),
    "create_session": flag,
    "session_ttl_s": integer(0, MAX_TTL_S, hint="0: no limit"),
}


BODY = FieldTable(FIELDS, ("prompt",), UNSUPPORTED)


def read(body: dict[str, Any]) -> GenerationRequest:
    """Read the body of a generate request. Raises `InvalidRequest`."""
    values = BODY.read(body)
    arguments = common_arguments(values)
    has_logprobs = "logprobs" in values
    if has_logprobs:
        arguments["sampling"] = with_logprobs(arguments["sampling"], values["logprobs"])
    if "prompt_logprobs" in values:
        arguments["prompt_logprobs"] = values["prompt_logprobs"]
    request = GenerationRequest(
        endpoint="generate",
        prompts=values["prompt"],
        max_tokens=values.get("max_tokens"),
        logprobs=has_logprobs,
        top_logprobs=values.get("logprobs", 0),
        **_session_arguments(values),
        **arguments,
    )
    if request.session_id is not None and "prompt_logprobs" in values:
        raise InvalidRequest(
            "prompt_logprobs is given with a session, whose earlier text is not computed again; leave one out",
            "prompt_logprobs",
        )
    if request.session_id is not None and len(request.prompts) > 1:
        raise InvalidRequest(
            f"prompt has {len(request.prompts)} prompts; a session continues with one: send one", "prompt"
        )
    if request.session_id is not None and request.n > 1:
        raise InvalidRequest(f"n is {request.n}; a session continues with one choice: leave n out", "n")
    return check_combination(request)


def _session_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Return the session's arguments of `GenerationRequest`."""
    creates = values.get("create_session", False)
    name = values.get("session_id", "" if creates else None)
    if "session_ttl_s" in values and not creates and name != "":
        raise InvalidRequest(
            'session_ttl_s is for a new session; send it with "create_session": true or with an empty session_id',
            "session_ttl_s",
        )
    return {
        "session_id": name,
        "creates_session": creates,
        "session_ttl_s": values.get("session_ttl_s"),
    }
