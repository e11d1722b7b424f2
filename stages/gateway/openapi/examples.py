"""An example of the request and of the answer of each operation, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, NamedTuple

MODEL = "smollm2-135m-instruct"
_ID = "5f0c1d2e3a4b5c6d7e8f9a0b"
_QUESTION = [{"role": "user", "content": "Name three colours."}]
_TEXT = "Red, green and blue."
_CREATED = 1767225600
_USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 6,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_PROMPT_USAGE = {"prompt_tokens": 4, "total_tokens": 4}
_ITEM = {
    "type": "message",
    "id": f"msg_{_ID}",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "Name three colours."}],
}
_CONVERSATION = {"id": f"conv_{_ID}", "object": "conversation", "created_at": _CREATED, "metadata": {}}
_RESPONSE = {
    "id": f"resp_{_ID}",
    "object": "response",
    "created_at": _CREATED,
    "status": "completed",
    "model": MODEL,
    "output": [
        {
            "type": "message",
            "id": f"msg_{_ID}",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": _TEXT, "annotations": []}],
        }
    ],
    "error": None,
    "incomplete_details": None,
    "usage": {"input_tokens": 12, "output_tokens": 6, "total_tokens": 18},
}
_ITEMS = {
    "object": "list",
    "data": [_ITEM],
    "first_id": _ITEM["id"],
    "last_id": _ITEM["id"],
    "has_more": False,
}
_MODEL = {
    "id": MODEL,
    "object": "model",
    "created": _CREATED,
    "owned_by": "starling",
    "ready": True,
    "state": "loaded",
    "context_length": 8192,
    "quantization": "Q4_1",
}
_READINESS = {
    "ready": True,
    "reason": None,
    "stages": {"scheduler": {"ready": True, "reason": None}},
    "models": {MODEL: {"ready": True, "reason": None}},
}
_STATE = {
    "in_flight": 0,
    "models": {MODEL: 0},
    "instances": [{"model": MODEL, "instance": MODEL, "state": "serving", "in_flight": 0, "worker_groups": 1}],
    "use": {MODEL: {"state": "loaded", "pinned": False, "last_used": None, "expires_in_s": None}},
    "draining": {},
    "readiness": _READINESS,
}
_CHANGED = {**_STATE, "change": {"id": "load-1", "done": True}}
_ADAPTER = {"id": 0, "path": "/data/support-lora", "scale": 0.0, "model": f"{MODEL}:support"}


class Example(NamedTuple):
    """The body of a request, and of its answer with status 200; None: there is none, or it is not JSON."""

    request: dict[str, Any] | list[Any] | None = None
    answer: dict[str, Any] | list[Any] | None = None


EXAMPLES: dict[tuple[str, str], Example] = {
    ("POST", "/v1/chat/completions"): Example(
        {"model": MODEL, "messages": _QUESTION, "max_tokens": 20, "seed": 1},
        {
            "id": f"chatcmpl-{_ID}",
            "object": "chat.completion",
            "created": _CREATED,
            "model": MODEL,
            "system_fingerprint": "fp_0123456789",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": _TEXT, "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": _USAGE,
        },
    ),
    ("POST", "/v1/completions"): Example(
        {"model": MODEL, "prompt": "The lighthouse keeper", "max_tokens": 20, "seed": 7},
        {
            "id": f"cmpl-{_ID}",
            "object": "text_completion",
            "created": _CREATED,
            "model": MODEL,
            "system_fingerprint": "fp_0123456789",
            "choices": [{"index": 0, "text": " was awake.", "logprobs": None, "finish_reason": "stop"}],
            "usage": _USAGE,
        },
    ),
    ("POST", "/v1/messages"): Example(
        {"model": MODEL, "max_tokens": 20, "messages": _QUESTION},
        {
            "id": f"msg_{_ID}",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": _TEXT}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 12, "output_tokens": 6},
        },
    ),
    ("POST", "/v1/messages/count_tokens"): Example({"model": MODEL, "messages": _QUESTION}, {"input_tokens": 12}),
    ("POST", "/v1/responses"): Example(
        {"model": MODEL, "input": "Name three colours.", "max_output_tokens": 20}, _RESPONSE
    ),
    ("GET", "/v1/responses/{id}"): Example(None, _RESPONSE),
    ("DELETE", "/v1/responses/{id}"): Example(None, {"id": f"resp_{_ID}", "object": "response", "deleted": True}),
    ("POST", "/v1/responses/{id}/cancel"): Example(None, {**_RESPONSE, "status": "cancelled", "output": []}),
    ("GET", "/v1/responses/{id}/input_items"): Example(None, _ITEMS),
    ("POST", "/v1/conversations"): Example({"items": _QUESTION, "metadata": {"topic": "colours"}}, _CONVERSATION),
    ("GET", "/v1/conversations/{id}"): Example(None, _CONVERSATION),
    ("POST", "/v1/conversations/{id}"): Example({"metadata": {"topic": "colours"}}, _CONVERSATION),
    ("DELETE", "/v1/conversations/{id}"): Example(
        None, {"id": f"conv_{_ID}", "object": "conversation.deleted", "deleted": True}
    ),
    ("GET", "/v1/conversations/{id}/items"): Example(None, _ITEMS),
    ("POST", "/v1/conversations/{id}/items"): Example({"items": _QUESTION}, _ITEMS),
    ("GET", "/v1/conversations/{id}/items/{item}"): Example(None, _ITEM),
    ("DELETE", "/v1/conversations/{id}/items/{item}"): Example(None, _CONVERSATION),
    ("POST", "/v1/generate"): Example(
        {"prompt": "The lighthouse keeper", "max_tokens": 3, "seed": 7},
        {
            "id": f"req-{_ID}",
            "object": "generation",
            "created": _CREATED,
            "model": MODEL,
            "seed": 7,
            "choices": [
                {
                    "index": 0,
                    "text": " was awake.",
                    "tokens": [436, 22576, 30],
                    "finish_reason": "length",
                    "stop_string": None,
                    "logprobs": None,
                }
            ],
            "usage": _USAGE,
        },
    ),
    ("POST", "/v1/embeddings"): Example(
        {"model": MODEL, "input": ["a lighthouse"], "dimensions": 2},
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
            "model": MODEL,
            "usage": _PROMPT_USAGE,
        },
    ),
    ("POST", "/v1/rerank"): Example(
        {"query": "a lighthouse", "documents": ["a tower by the sea", "a loaf of bread"], "top_n": 1},
        {
            "object": "list",
            "model": MODEL,
            "results": [{"index": 0, "relevance_score": 0.9}],
            "usage": _PROMPT_USAGE,
        },
    ),
    ("POST", "/v1/score"): Example(
        {"text_1": "a lighthouse", "text_2": ["a tower by the sea", "a loaf of bread"]},
        {
            "object": "list",
            "model": MODEL,
            "data": [{"index": 0, "object": "score", "score": 0.9}, {"index": 1, "object": "score", "score": 0.7}],
            "usage": _PROMPT_USAGE,
        },
    ),
    ("POST", "/v1/session/close"): Example(
        {"session_id": "tour"}, {"model": MODEL, "session_id": "tour", "closed": True}
    ),
    ("POST", "/v1/tokenize"): Example(
        {"text": "Good morning"},
        {"model": MODEL, "tokens": [14229, 5738], "offsets": [[0, 4], [4, 12]], "count": 2},
    ),
    ("POST", "/v1/detokenize"): Example({"tokens": [14229, 5738]}, {"model": MODEL, "text": "Good morning"}),
    ("DELETE", "/v1/requests/{id}"): Example(None, {"id": f"req-{_ID}", "cancelled": True}),
    ("GET", "/v1/models"): Example(None, {"object": "list", "data": [_MODEL]}),
    ("GET", "/v1/models/{id}"): Example(None, _MODEL),
    ("GET", "/health"): Example(
        None,
        {
            "status": "healthy",
            "uptime_seconds": 60,
            "total_requests": 3,
            "cache_hit_rate": 0.25,
            "memory_usage_mb": 900,
        },
    ),
    ("GET", "/ready"): Example(None, _READINESS),
    ("GET", "/v1/admin/state"): Example(None, _STATE),
    ("POST", "/v1/admin/drain"): Example(
        {"target": "all", "timeout_s": 30}, {**_STATE, "draining": {"all": {"left_s": 30.0, "ended": 0}}}
    ),
    ("POST", "/v1/admin/resume"): Example({"target": "all"}, _STATE),
    ("POST", "/v1/admin/load"): Example({"target": "my-model", "path": "/data/my-model.gguf"}, _CHANGED),
    ("POST", "/v1/admin/reload"): Example({"target": MODEL, "timeout_s": 600}, _CHANGED),
    ("POST", "/v1/admin/unload"): Example({"target": "my-model"}, _CHANGED),
    ("POST", "/v1/load_lora_adapter"): Example({"lora_name": "support", "lora_path": "/data/support-lora"}),
    ("POST", "/v1/unload_lora_adapter"): Example({"lora_name": "support"}),
    ("GET", "/lora-adapters"): Example(None, [_ADAPTER]),
    ("POST", "/lora-adapters"): Example([{"id": 0, "scale": 0}], {"success": True}),
}
