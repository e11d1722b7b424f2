"""`pre_inference`: what a plugin gets of a request, and how its changes become part of the request."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from pipeline.api.fields import Reader, integer, strings
from pipeline.api.generation_fields import (
    MAX_OUTPUT_TOKENS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    SAMPLER_FIELDS,
    read_seed,
)
from pipeline.api.json_body import to_json
from pipeline.api.requests.chat import MAX_MESSAGES
from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields, check_combination
from pipeline.api.requests.tool_history import check_results
from pipeline.errors import InvalidRequest
from stages.gateway.plugins.errors import failed, refused
from stages.gateway.plugins.frames import REFUSED, Failed, Pre, PreDone, Reply, frame
from stages.gateway.plugins.interface import InferenceRequest
from stages.gateway.plugins.process_client import PluginProcess

HOOK = "pre_inference"


class PreCall:
    """One call of `pre_inference`. It is made once: `result` has its reply, or the reason why there is none."""

    hook = HOOK

    def __init__(self, process: PluginProcess, request: InferenceRequest) -> None:
        self.result: asyncio.Future[InferenceRequest] = asyncio.get_running_loop().create_future()
        self._process = process
        self._request = request

    @property
    def is_dead(self) -> bool:
        """Whether the client has left."""
        return self.result.done()

    def encode(self, process: PluginProcess) -> bytes | None:
        """See `Call.encode`."""
        if process.info is None or not process.info.has_pre:
            self.result.set_result(self._request)
            return None
        return frame(Pre(self._request))

    def done(self, reply: Reply) -> None:
        """See `Call.done`."""
        match reply:
            case PreDone():
                self.result.set_result(reply.request)
            case Failed() if reply.kind == REFUSED:
                self.result.set_exception(refused(self._process.name, reply))
            case Failed():
                self.fail(reply.message, is_temporary=False)
            case _:
                self.fail("it sent a wrong frame", is_temporary=False)

    def fail(self, reason: str, *, is_temporary: bool) -> None:
        """See `Call.fail`."""
        if not self.result.done():
            self.result.set_exception(failed(self._process.name, HOOK, reason, is_temporary=is_temporary))

    def repeats(self) -> bool:
        """Never: the hook may have had an effect."""
        return False


def offered(generation: GenerationRequest, request_id: str, tenant: str) -> InferenceRequest:
    """Return what a plugin gets of a request."""
    template = generation.template
    return InferenceRequest(
        id=request_id,
        endpoint=generation.endpoint,
        model=generation.model,
        tenant=tenant,
        messages=generation.messages,
        prompts=[prompt if isinstance(prompt, str) else list(prompt) for prompt in generation.prompts],
        suffix=generation.suffix if generation.suffix is not msgspec.UNSET else None,
        documents=template.documents if template else None,
        max_tokens=generation.max_tokens,
        temperature=generation.sampling.temperature,
        top_p=generation.sampling.top_p,
        seed=generation.seed,
        stop=list(generation.stop),
    )


class _Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[_ToolCall] = []
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""


_READERS: dict[str, Reader] = {
    "max_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "temperature": SAMPLER_FIELDS["temperature"],
    "top_p": SAMPLER_FIELDS["top_p"],
    "seed": read_seed,
    "stop": strings(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
}
_NO_TOKENS: dict[str, Reader] = {"max_tokens": integer(0, MAX_OUTPUT_TOKENS)}  # where 0 generates nothing


def changed(generation: GenerationRequest, before: InferenceRequest, after: InferenceRequest) -> GenerationRequest:
    """Return the request with what a plugin changed. Raises `ValueError` for a result that cannot be used."""
    values = {name: getattr(after, name) for name in before.__struct_fields__}
    values = {name: value for name, value in values.items() if value != getattr(before, name)}
    readers = _READERS | (_NO_TOKENS if generation.endpoint in ("completions", "generate") else {})
    given = {name: value for name, value in values.items() if name in readers and value not in (None, [])}
    try:
        read = {name: readers[name](value, name) for name, value in given.items()}
        if "messages" in values:
            _check_messages(generation, before.messages, after.messages)
        if "prompts" in values and len(after.prompts) != len(before.prompts):
            raise ValueError(f"prompts has {len(after.prompts)} items, it had {len(before.prompts)}")
        for name in ("suffix", "documents"):
            if name in values and (values[name] is None or getattr(before, name) is None):
                raise ValueError(f"{name} was added or removed")
        return check_combination(_merged(generation, {**values, **read}))
    except (InvalidRequest, msgspec.ValidationError, TypeError) as error:
        raise ValueError(str(error)) from None


def _merged(generation: GenerationRequest, values: dict[str, Any]) -> GenerationRequest:
    sampling = {name: values.pop(name) for name in ("temperature", "top_p") if name in values}
    if sampling:
        values["sampling"] = msgspec.structs.replace(generation.sampling, **sampling)
    if "documents" in values and generation.template:
        values["template"] = msgspec.structs.replace(generation.template, documents=values.pop("documents"))
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    if "prompts" in values:
        values["prompts"] = [one if isinstance(one, str) else tuple(one) for one in values["prompts"]]
    if "messages" in values and generation.response:
        values["response"] = _with_input(generation.response, values["messages"])
    return msgspec.structs.replace(generation, **values)


def _check_messages(generation: GenerationRequest, before: Any, after: Any) -> None:
    if before is None or after is None:
        raise ValueError("messages were added or removed")
    if not 1 <= len(after) <= MAX_MESSAGES:
        raise ValueError(f"there are {len(after)} messages; 1 to {MAX_MESSAGES} are allowed")
    msgspec.convert(after, list[_Message])
    if generation.response:  # these are checked with the conversation that they continue
        n = generation.response.n_instructions
        if [message["role"] for message in after[:n]] != ["system"] * n:
            raise ValueError("the first message was the instructions")
    else:
        check_results(after, [f"messages[{index}]" for index in range(len(after))])


def _with_input(fields: ResponseFields, messages: list[dict[str, Any]]) -> ResponseFields:
    """What is stored of a request for /v1/responses, made of its changed messages."""
    n = fields.n_instructions
    repeated = msgspec.json.decode(fields.repeated)
    if n:
        repeated["instructions"] = messages[0]["content"]
    items = [item for message in messages[n:] for item in _items(message)]
    return msgspec.structs.replace(
        fields, conversation=messages[n:], inputs=to_json(items), repeated=msgspec.json.encode(repeated)
    )


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of OpenAI's Responses API that are read as this message."""
    if message["role"] == "tool":
        return [
            {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]},
        ]
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}]})
    calls = message.get("tool_calls", ())
    if message["content"] or not (items or calls):
        items.append({"role": message["role"], "content": message["content"]})
    for call in calls:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else to_json(arguments).decode()
        named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": text}
        items.append({"type": "function_call", **named})
    return items


async def ask(process: PluginProcess, generation: GenerationRequest, request_id: str, tenant: str) -> GenerationRequest:
    """Return the request as one plugin leaves it. Raises `StarlingError`."""
    before = offered(generation, request_id, tenant)
    call = PreCall(process, before)
    process.submit(call)
    try:
        after = await call.result
    finally:
        call.result.cancel()
    if after is before:
        return generation
    try:
        return changed(generation, before, after)
    except ValueError as error:
        raise failed(process.name, HOOK, f"its result cannot be used: {error}", is_temporary=False) from None
