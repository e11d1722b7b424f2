"""The schemas of responses. They name the members that are always there; others may be added."""

from __future__ import annotations

from typing import Any

from pipeline.api.error_response import ANTHROPIC_TYPES
from pipeline.api.json_schema import Schema, array_of
from pipeline.errors import CODES

_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_STRING: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_STRING_OR_NULL: Schema = {"type": ["string", "null"]}
_OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}


def ref(name: str) -> Schema:
    """Return a reference to a schema of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(optional: dict[str, Schema] | None = None, /, **members: Schema) -> Schema:
    return {"type": "object", "properties": {**members, **(optional or {})}, "required": list(members)}


def _openai_answer(kind: str, **choice: Schema) -> Schema:
    return _object(
        id=_STRING,
        object={"const": kind},
        created=_INTEGER,
        model=_STRING,
        system_fingerprint=_STRING,
        choices=array_of(_object(index=_COUNT, logprobs=_OBJECT_OR_NULL, finish_reason=_STRING, **choice)),
        usage=ref("Usage"),
    )


_PROMPT_USAGE = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)
_TOOL_CALL = _object(id=_STRING, type={"const": "function"}, function=_object(name=_STRING, arguments=_STRING))

SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=_STRING, type=_STRING, code={"enum": sorted(CODES)}, param=_STRING_OR_NULL)),
    "MessageError": _object(
        {"request_id": _STRING},
        type={"const": "error"},
        error=_object(type={"enum": sorted({*ANTHROPIC_TYPES.values(), "api_error"})}, message=_STRING),
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "ChatCompletion": _openai_answer(
        "chat.completion",
        message=_object(
            {"tool_calls": array_of(_TOOL_CALL), "reasoning_content": _STRING, "reasoning": _STRING},
            role={"const": "assistant"},
            content=_STRING_OR_NULL,
            refusal={"type": "null"},
        ),
    ),
    "Completion": _openai_answer("text_completion", text=_STRING),
    "Message": _object(
        id=_STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_STRING,
        content=array_of(_object(type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason=_STRING_OR_NULL,
        stop_sequence=_STRING_OR_NULL,
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "Response": _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        model=_STRING,
        output=array_of(_object(type={"enum": ["message", "reasoning", "function_call"]}, id=_STRING, status=_STRING)),
        error=_OBJECT_OR_NULL,
        incomplete_details=_OBJECT_OR_NULL,
        usage=_OBJECT_OR_NULL,
    ),
    "DeletedResponse": _object(id=_STRING, object={"const": "response"}, deleted={"const": True}),
    "Conversation": _object(id=_STRING, object={"const": "conversation"}, created_at=_INTEGER, metadata=_OBJECT),
    "DeletedConversation": _object(id=_STRING, object={"const": "conversation.deleted"}, deleted={"const": True}),
    "Item": _object(type=_STRING, id=_STRING, status=_STRING),
    "Items": _object(
        object={"const": "list"},
        data=array_of(ref("Item")),
        first_id=_STRING_OR_NULL,
        last_id=_STRING_OR_NULL,
        has_more=_FLAG,
    ),
    "MessageTokens": _object(input_tokens=_COUNT),
    "Embeddings": _object(
        object={"const": "list"},
        data=array_of(
            _object(object={"const": "embedding"}, index=_COUNT, embedding={"anyOf": [array_of(_NUMBER), _STRING]})
        ),
        model=_STRING,
        usage=_PROMPT_USAGE,
    ),
    "Ranking": _object(
        object={"const": "list"},
        model=_STRING,
        results=array_of(_object({"document": _object(text=_STRING)}, index=_COUNT, relevance_score=_NUMBER)),
        usage=_PROMPT_USAGE,
    ),
    "Scores": _object(
        object={"const": "list"},
        model=_STRING,
        data=array_of(_object(index=_COUNT, object={"const": "score"}, score=_NUMBER)),
        usage=_PROMPT_USAGE,
    ),
    "Generation": _object(
        {"session_id": _STRING},
        id=_STRING,
        object={"const": "generation"},
        created=_INTEGER,
        model=_STRING,
        seed=_COUNT,
        choices=array_of(
            _object(
                index=_COUNT,
                text=_STRING,
                tokens=array_of(_COUNT),
                finish_reason=_STRING,
                stop_string=_STRING_OR_NULL,
                logprobs={"type": ["array", "null"]},
            )
        ),
        usage=ref("Usage"),
    ),
    "ClosedSession": _object(model=_STRING, session_id=_STRING, closed={"const": True}),
    "Tokens": _object(model=_STRING, tokens=array_of(_COUNT), offsets=array_of(array_of(_COUNT)), count=_COUNT),
    "Text": _object(model=_STRING, text=_STRING),
    "Model": _object(
        {
            "context_length": _COUNT,
            "vocab_size": _COUNT,
            "architecture": _STRING,
            "parameters": _COUNT,
            "quantization": _STRING,
            "state": {"enum": ["loaded", "loading", "unloading", "unloaded"]},
            "pinned": _FLAG,
            "digest": _STRING,
            "chat": _FLAG,
            "parent": _STRING,
            "root": _STRING,
            "adapter_digest": _STRING_OR_NULL,
        },
        id=_STRING,
        object={"const": "model"},
        created=_INTEGER,
        owned_by=_STRING,
        ready=_FLAG,
    ),
    "Models": _object(object={"const": "list"}, data=array_of(ref("Model"))),
    "Health": _object(
        status={"enum": ["healthy", "draining"]},
        uptime_seconds=_COUNT,
        total_requests=_COUNT,
        cache_hit_rate=_NUMBER,
        memory_usage_mb=_COUNT,
    ),
    "Readiness": _object(ready=_FLAG, reason=_STRING_OR_NULL, stages=_OBJECT, models=_OBJECT),
    "NotReady": {"anyOf": [{"$ref": "#/components/schemas/Readiness"}, {"$ref": "#/components/schemas/Error"}]},
    "AdminState": _object(
        {"change": _OBJECT},
        in_flight=_COUNT,
        models={"type": "object", "additionalProperties": _COUNT},
        instances=array_of(_OBJECT),
        use=_OBJECT,
        draining=_OBJECT,
        readiness=ref("Readiness"),
    ),
    "Adapters": array_of(_object(id=_COUNT, path=_STRING, scale={"const": 0}, model=_STRING)),
    "AdapterScales": _object(success={"const": True}),
}


def json_content(name: str) -> dict[str, Any]:
    """Return the content of a JSON response."""
    return {"application/json": {"schema": ref(name)}}
