"""The field `prompt` of the endpoints that continue a text: one or several texts, or token ids."""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import TOKEN_ID, invalid_value, token_ids
from pipeline.api.generation_fields import MAX_PROMPT_IDS, MAX_PROMPTS
from pipeline.api.json_schema import any_of, array_of, described
from pipeline.api.requests.generation_request import TextOrIds
from pipeline.errors import InvalidRequest

_PROMPT_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


_TOKENS = array_of(TOKEN_ID, most=MAX_PROMPT_IDS)


@described(
    any_of(
        {"type": "string"},
        array_of({"type": "string"}, least=1, most=MAX_PROMPTS),
        {**_TOKENS, "minItems": 1},
        array_of(_TOKENS, least=1, most=MAX_PROMPTS),
    )
)
def read_prompts(value: Any, name: str) -> list[TextOrIds]:
    """Read any of OpenAI's four kinds of prompt as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid_value(name, value, _PROMPT_KINDS)
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one token or one text", name)
    ids = token_ids(MAX_PROMPT_IDS)
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [ids(value, name)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{name} has {len(value)} prompts; at most {MAX_PROMPTS} are allowed", name)
    prompts: list[TextOrIds] = []
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            raise invalid_value(where, item, f"of the same kind as the first: {name} is {_PROMPT_KINDS}")
        prompts.append(item if isinstance(item, str) else ids(item, where))
    return prompts
