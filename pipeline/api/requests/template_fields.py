"""The fields of a chat request that go to the model's chat template: documents, variables, the end of the prompt.

The names are those of vLLM and Hugging Face.  What a variable means is up to the template; one that it does not use
has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.api.fields import Reader, flag, invalid_value
from pipeline.api.json_schema import array_of, described
from pipeline.api.requests.generation_request import TemplateArguments
from pipeline.errors import InvalidRequest

MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64
MAX_NAME_CHARACTERS = 64
MAX_VALUES = 16_384  # of all documents or variables, at any depth
MAX_INT_BITS = 63  # of a number: frames between stages hold no larger one
# What the template gets under these names is not the client's to choose.
_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_RESERVED = ("bos_token", "eos_token", "raise_exception", "strftime_now")


@described(array_of({"type": "object"}, most=MAX_DOCUMENTS))
def read_documents(value: Any, name: str) -> list[dict[str, Any]]:
    """Read documents: objects of any content, usually with `title` and `text`."""
    if not isinstance(value, list):
        raise invalid_value(name, value, 'an array of objects like {"title": ..., "text": ...}')
    if len(value) > MAX_DOCUMENTS:
        raise InvalidRequest(f"{name} has {len(value)} documents; at most {MAX_DOCUMENTS} are allowed", name)
    for index, document in enumerate(value):
        if not isinstance(document, dict):
            raise invalid_value(f"{name}[{index}]", document, 'an object like {"title": ..., "text": ...}')
    _check_values(value, name)
    return value


@described({"type": "object", "maxProperties": MAX_VARIABLES, "propertyNames": {"maxLength": MAX_NAME_CHARACTERS}})
def read_variables(value: Any, name: str) -> dict[str, Any]:
    """Read the template's variables by name."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"enable_thinking": false}')
    if len(value) > MAX_VARIABLES:
        raise InvalidRequest(f"{name} has {len(value)} variables; at most {MAX_VARIABLES} are allowed", name)
    for variable in value:
        if variable in _FIELDS:
            raise InvalidRequest(f"{name}.{variable} is a field of its own; give {variable} beside {name}", name)
        if variable in _RESERVED:
            raise InvalidRequest(f"{name}.{variable} is set by the server; leave it out", name)
        if not variable.isidentifier() or len(variable) > MAX_NAME_CHARACTERS:
            raise InvalidRequest(
                f"{name} has the variable {variable[:MAX_NAME_CHARACTERS]!r}; a name has letters, digits and "
                f"underscores, and at most {MAX_NAME_CHARACTERS} of them",
                name,
            )
    _check_values(value, name)
    return value


def _check_values(value: Any, name: str) -> None:
    """Raise `InvalidRequest` for too many values, or for a number that does not fit a frame."""
    pending, count = [value], 0
    while pending:
        item = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise InvalidRequest(f"{name} has more than {MAX_VALUES} values; send fewer", name)
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, int) and item.bit_length() > MAX_INT_BITS:
            raise InvalidRequest(f"{name} has the number {str(item)[:32]}; send it as a string", name)


TEMPLATE_FIELDS: dict[str, Reader] = {
    "documents": read_documents,
    "chat_template_kwargs": read_variables,
    "add_generation_prompt": flag,
    "continue_final_message": flag,
}


def template_arguments(
    values: Mapping[str, Any], tools: list[dict[str, Any]] | None = None
) -> TemplateArguments | msgspec.UnsetType:
    """Return the tools and what `TEMPLATE_FIELDS` has read; UNSET if nothing was given. Raises `InvalidRequest`."""
    continues = values.get("continue_final_message", False)
    if continues and values.get("add_generation_prompt"):
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true; the prompt can end in the last message or "
            "begin a new one: leave one of them out",
            "continue_final_message",
        )
    if tools is None and not any(name in values for name in TEMPLATE_FIELDS):
        return msgspec.UNSET
    return TemplateArguments(
        tools=tools,
        documents=values.get("documents"),
        variables=values.get("chat_template_kwargs", {}),
        add_generation_prompt=values.get("add_generation_prompt", not continues),
        continue_final_message=continues,
    )
