"""The client's body as the body of another engine.

It is read as a server of ours reads it.  What the engine would do otherwise, or not at all, is refused by the field's
name; for what the client leaves out the engine gets our defaults, not its own.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from pipeline.api.body_names import names_of
from pipeline.api.generation_fields import HINT_FIELDS
from pipeline.api.json_body import parse_object, to_json
from pipeline.api.output_text import TEXT, TextSoFar
from pipeline.api.request_name import RequestName
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.requests.readers import READERS
from pipeline.api.requests.tool_fields import ANY_TOOL
from pipeline.errors import InvalidRequest, StarlingError
from pipeline.protocol.messages import Constraint
from stages.agent.engines.dialect import ChatTemplate, Dialect
from stages.agent.engines.door.answer_form import AnswerForm, form_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_READERS = {CHAT: "chat", COMPLETIONS: "completions"}
# Fields that every engine honours; `prediction` changes no text.
_HONOURED = {
    *("model", "temperature", "top_p", "seed", "stop", "n", "stream", "stream_options", "prediction"),
    *HINT_FIELDS,
}
_CHAT = {
    *("messages", "max_tokens", "max_completion_tokens", "add_generation_prompt", "continue_final_message"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs", "top_logprobs"),
}
_COMPLETIONS = {"prompt", "max_tokens"}
# Fields that some engines honour; `logprobs` is that of a completion.
OPTIONAL = {
    *("min_p", "top_k", "ignore_eos", "repetition_penalty", "frequency_penalty", "presence_penalty", "cache_salt"),
    "logprobs",
}
_IN_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id"}
_WHOLE_TEMPLATE = ChatTemplate(tools=True, calls=True)


class EngineRequest(NamedTuple):
    """What the engine gets, and what its answer is formatted by."""

    request: GenerationRequest
    body: dict[str, Any]  # of the engine
    path: str
    left: int | None  # output tokens that are still to come; None: as many as the context leaves
    form: AnswerForm


def read(
    path: str, raw: bytes, content_type: str, dialect: Dialect, template: ChatTemplate = _WHOLE_TEMPLATE
) -> GenerationRequest:
    """The client's request. Raises `InvalidRequest` with the field that the engine cannot honour."""
    body = parse_object(raw, content_type)
    if path not in _READERS:
        raise InvalidRequest(
            f"the model is computed by {dialect.name}, which answers {COMPLETIONS} and {CHAT} here; use one of them",
            "model",
        )
    reader = READERS[_READERS[path]]
    try:
        request: GenerationRequest = reader(body)
        honoured = _HONOURED | (_CHAT if path == CHAT else _COMPLETIONS) | (OPTIONAL & dialect.honoured)
        for name in body:
            if name not in honoured and not _is_neutral(reader, body, name, request):
                raise _refusal(name, dialect)
        if field := dialect.unfit_field(request):
            raise _refusal(field, dialect)
        if request.max_tokens == 0:
            raise InvalidRequest(
                f"max_tokens is 0, and {dialect.name} generates at least 1 token; leave it out", "max_tokens"
            )
        if path == CHAT:
            _check_messages(request, dialect, template)
        elif len(request.prompts) != 1 or not isinstance(request.prompts[0], str):
            raise InvalidRequest(
                f"prompt has several texts, or token ids; the model is computed by {dialect.name}: send one text",
                "prompt",
            )
        elif not request.prompts[0]:  # llama-server's answer would be empty, with the reason `length`
            raise InvalidRequest(
                f"prompt is empty, and {dialect.name} needs a token to continue from: send some text", "prompt"
            )
    except StarlingError as error:
        error.names = names_of(body)
        raise
    return request


def for_engine(
    path: str,
    request: GenerationRequest,
    name: RequestName,
    dialect: Dialect,
    so_far: TextSoFar | None,
    *,
    may_reuse: bool,
) -> EngineRequest:
    """The engine's request; with `so_far` the answer goes on after that text. Raises `InvalidRequest` if none can."""
    form = form_of(request)
    if so_far is not None and form.fixed_by:
        raise InvalidRequest(
            f"an engine has died in the middle of this answer, and {dialect.name} cannot go on from the text of a "
            f"request with {form.fixed_by}; send the request again",
            TEXT,
        )
    salt = cache_salt(request, name)
    seed = request.seed if request.seed is not None else name.seed or 0
    if so_far is not None:  # the same numbers again would be drawn for other tokens
        seed = (seed + so_far.tokens) % (1 << 64)
    left = None if request.max_tokens is None else request.max_tokens - (so_far.tokens if so_far is not None else 0)
    body: dict[str, Any] = {
        "model": request.model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"max_tokens": left} if left is not None else {}),
        **({"stop": list(request.stop)} if request.stop else {}),
        **({"n": request.n} if request.n > 1 else {}),
        **(dialect.logprobs(request) if request.logprobs else {}),
        **({"response_format": _response_format(request.constraint)} if request.constraint else {}),
        **_tools(request),
        **dialect.parameters(request, seed, salt=salt, may_reuse=may_reuse),
    }
    text = so_far.text if so_far is not None else ""
    if request.messages is None:
        (prompt,) = request.prompts
        assert isinstance(prompt, str)
        body["prompt"] = prompt + text
    else:
        body |= _messages(request, text)
    return EngineRequest(request, body, path, left, form)


def cache_salt(request: GenerationRequest, name: RequestName) -> str:
    """Of what the engine may share cached prompts; "": with all requests that have none."""
    salt = name.salted(request.cache_salt)
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else ""


def _messages(request: GenerationRequest, text: str) -> dict[str, Any]:
    """The messages, and how the prompt ends; the text so far is the beginning of the last message."""
    assert request.messages is not None
    messages, template = [_with_text_arguments(message) for message in request.messages], request.template
    continues = template.continue_final_message if template else False
    adds_prompt = template.add_generation_prompt if template else True
    if text and continues:
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + text}
    elif text:
        messages.append({"role": "assistant", "content": text})
        continues, adds_prompt = True, False
    if continues:
        return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    return {"messages": messages, "add_generation_prompt": adds_prompt}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message in OpenAI's form: the arguments of a call are JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = to_json(call["function"]["arguments"]).decode()
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _tools(request: GenerationRequest) -> dict[str, Any]:
    """The fields of tools; none if no tool can be called."""
    if not request.tools or not request.template:
        return {}
    forced = request.tools.forced
    choice: Any = {"type": "function", "function": {"name": forced}} if forced else "auto"
    tools = request.template.tools or []
    if forced:  # the arguments of such a call match the schema; at vLLM those of strict tools alone do
        tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    return {
        "tools": tools,
        "tool_choice": "required" if forced == ANY_TOOL else choice,
        "parallel_tool_calls": not request.tools.is_single,
    }


def _response_format(constraint: Constraint) -> dict[str, Any]:
    schema = json.loads(constraint.text)
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _check_messages(request: GenerationRequest, dialect: Dialect, template: ChatTemplate) -> None:
    assert request.messages is not None
    if request.tools and not template.tools:
        raise _without_place("tools", dialect)
    for index, message in enumerate(request.messages):
        for key, value in message.items():
            where = f"messages[{index}].{key}"
            if key not in _IN_MESSAGE or (key == "content" and not isinstance(value, str)):
                raise _refusal(where, dialect)
        if message["role"] not in ("system", "user", "assistant", "tool"):
            raise _refusal(f"messages[{index}].role", dialect)
        calls = message.get("tool_calls", ())
        if calls and not template.calls:
            raise _without_place(f"messages[{index}].tool_calls", dialect)
        for place, call in enumerate(calls):
            if not isinstance(call["function"]["arguments"], dict):
                raise InvalidRequest(
                    f"the arguments are not the text of a JSON object, which {dialect.name} needs; send {{}} instead",
                    f"messages[{index}].tool_calls[{place}].function.arguments",
                )
    if request.template and not (request.template.add_generation_prompt or request.template.continue_final_message):
        raise _refusal("add_generation_prompt", dialect)
    if request.template and request.template.continue_final_message and request.messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message is true, and the last message is not the assistant's; leave it out",
            "continue_final_message",
        )


def _is_neutral(reader: Any, body: dict[str, Any], name: str, request: GenerationRequest) -> bool:
    """Whether the request means the same without the field."""
    try:
        without: object = reader({key: value for key, value in body.items() if key != name})
    except InvalidRequest:
        return False
    return without == request


def _without_place(field: str, dialect: Dialect) -> InvalidRequest:
    return InvalidRequest(
        f"{field} is not possible for this model: its chat template has no place for it, so that {dialect.name} would "
        f"leave it out; leave it out, or use another model",
        field,
    )


def _refusal(field: str, dialect: Dialect) -> InvalidRequest:
    return InvalidRequest(
        f"{field} is not possible for this model: {dialect.name} computes it, and what that does with the field is not "
        f"what this API promises; leave it out, or use a model whose `engine` in GET /v1/models is starling",
        field,
    )
