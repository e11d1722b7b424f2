"""What the routes are, by method and path: summary, body, response and statuses.

A route that is missing here appears in the document with the first line of its handler's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.api.fields import FieldTable
from pipeline.api.json_schema import Schema, nullable
from pipeline.api.requests import (
    chat,
    completions,
    conversations,
    embeddings,
    generate,
    messages,
    rerank,
    responses,
    session_close,
)
from pipeline.api.requests.tokenize import DETOKENIZE_BODY, TOKENIZE_BODY
from stages.gateway import admin
from stages.gateway.endpoints import lora_adapters
from stages.gateway.openapi.responses import json_content

STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
TEXT = {"text/plain": {"schema": {"type": "string"}}}

# What a status means; the codes of the errors are in the schema `Error`.
STATUSES = {
    200: "The answer.",
    304: "The client has the current version.",
    308: "The path's newer name.",
    400: "A field is wrong or unknown, or the prompt does not fit.",
    401: "No API key, or an unknown one.",
    403: "The API key lacks the permission.",
    404: "No such model, session or request.",
    408: "The body did not arrive in time.",
    409: "In use by another request, or in another state.",
    413: "The body is too large.",
    429: "A queue is full, or a quota is used up.",
    500: "The computation failed.",
    503: "The model is loading or down, the request was too slow, the server is draining, or its disk fails.",
    507: "The request can never fit.",
}

_KEYED = (401, 403, 429, 500, 503)  # of every request that needs a key
_WITH_BODY = (*_KEYED, 400, 408, 413)
_TEXT = (*_WITH_BODY, 404, 409, 507)
_ADMIN = (*_WITH_BODY, 404, 409, 507)
_PAGE = ("after", "limit", "order")  # names in `document.QUERY`


class Operation(NamedTuple):
    """One route. `content`: of the status 200. `statuses`: the others. `headers`: names in `document.HEADERS`."""

    summary: str
    tag: str
    content: Mapping[str, Any]
    body: Schema | None = None
    statuses: tuple[int, ...] = (500, 503)
    headers: tuple[str, ...] = ()
    error: str = "Error"  # name of the schema of errors
    query: tuple[str, ...] = ()  # names in `document.QUERY`


def _text(summary: str, table: FieldTable, answer: str) -> Operation:
    content = {**json_content(answer), **STREAM}
    return Operation(summary, "Text", content, table.schema(), _TEXT, ("Idempotency-Key", "Last-Event-ID"))


def _admin(op: str, summary: str) -> Operation:
    required = ["target"] if op in ("load", "reload", "unload") else []
    fields = {name: _ADMIN_FIELDS[name] for name in admin.FIELDS[op]}
    body: Schema = {
        "type": "object",
        "properties": {name: one if name in required else nullable(one) for name, one in fields.items()},
        "additionalProperties": False,
    }
    if required:
        body["required"] = required
    return Operation(summary, "Administration", json_content("AdminState"), body, _ADMIN)


_ADMIN_FIELDS: dict[str, Schema] = {
    "target": {"type": "string", "description": 'a model\'s name; drain and resume: or "all", the default'},
    "timeout_s": {
        "type": "number",
        "minimum": 0,
        "maximum": admin.MAX_TIMEOUT_S,
        "description": "default: of a drain 0 (requests in flight end at once), of the unload of a model 30, else 600",
    },
    "keep": {"type": "boolean", "description": "survives a restart of the gateway (default true)"},
    "exit": {"type": "boolean", "description": "leaves what a restarted gateway continues (default false)"},
    "path": {"type": "string", "maxLength": 4096, "description": "a GGUF file, or another source of a model"},
    "kv_cache_mb": {"type": "integer", "minimum": 0, "maximum": admin.MAX_KV_CACHE_MB},
    "change": {"type": "string", "maxLength": 64, "description": "an id; repeating it starts nothing"},
    "wait": {"type": "boolean", "description": "answer when the change has ended (default true)"},
}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _text("Chat, in OpenAI's format.", chat.BODY, "ChatCompletion"),
    ("POST", "/v1/completions"): _text("Text, in OpenAI's format.", completions.BODY, "Completion"),
    ("POST", "/v1/messages"): _text("Chat, in Anthropic's format.", messages.BODY, "Message")._replace(
        headers=("Idempotency-Key", "Last-Event-ID", "Anthropic-Version"), error="MessageError"
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "The number of tokens of a chat in Anthropic's format.",
        "Text",
        json_content("MessageTokens"),
        messages.COUNT_BODY.schema(),
        (*_WITH_BODY, 404, 409, 507),
        ("Anthropic-Version",),
        "MessageError",
    ),
    ("POST", "/v1/responses"): _text("A response, in the format of OpenAI's newer API.", responses.BODY, "Response"),
    ("GET", "/v1/responses/{id}"): Operation(
        "A stored response, or one that is being generated.",
        "Text",
        {**json_content("Response"), **STREAM},
        None,
        (*_KEYED, 400, 404, 409),
        ("Last-Event-ID",),
        query=("stream", "starting_after"),
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        "Deletes a stored response.", "Text", json_content("DeletedResponse"), None, (*_KEYED, 404, 409)
    ),
    ("POST", "/v1/responses/{id}/cancel"): Operation(
        "Ends a response in the background.", "Text", json_content("Response"), None, (*_KEYED, 400, 404)
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "The items of a response's input, in pages.",
        "Text",
        json_content("Items"),
        None,
        (*_KEYED, 400, 404),
        query=_PAGE,
    ),
    ("POST", "/v1/conversations"): Operation(
        "Makes a conversation.",
        "Conversations",
        json_content("Conversation"),
        conversations.CREATE_BODY.schema(),
        _WITH_BODY,
    ),
    ("GET", "/v1/conversations/{id}"): Operation(
        "A conversation.", "Conversations", json_content("Conversation"), None, (*_KEYED, 404)
    ),
    ("POST", "/v1/conversations/{id}"): Operation(
        "Replaces the metadata of a conversation.",
        "Conversations",
        json_content("Conversation"),
        conversations.UPDATE_BODY.schema(),
        (*_WITH_BODY, 404),
    ),
    ("DELETE", "/v1/conversations/{id}"): Operation(
        "Deletes a conversation.", "Conversations", json_content("DeletedConversation"), None, (*_KEYED, 404)
    ),
    ("GET", "/v1/conversations/{id}/items"): Operation(
        "The items of a conversation, in pages.",
        "Conversations",
        json_content("Items"),
        None,
        (*_KEYED, 400, 404),
        query=_PAGE,
    ),
    ("POST", "/v1/conversations/{id}/items"): Operation(
        "Adds items to a conversation.",
        "Conversations",
        json_content("Items"),
        conversations.ITEMS_BODY.schema(),
        (*_WITH_BODY, 404),
    ),
    ("GET", "/v1/conversations/{id}/items/{item}"): Operation(
        "An item of a conversation.", "Conversations", json_content("Item"), None, (*_KEYED, 404)
    ),
    ("DELETE", "/v1/conversations/{id}/items/{item}"): Operation(
        "Deletes an item of a conversation.", "Conversations", json_content("Conversation"), None, (*_KEYED, 404)
    ),
    ("POST", "/v1/generate"): _text(
        "Text or token ids, with all parameters and sessions.", generate.BODY, "Generation"
    ),
    ("GET", "/v1/requests/{id}"): Operation(
        "Resumes a stream, or returns an answer once more.",
        "Text",
        {"application/json": {"schema": {"type": "object"}}, **STREAM},
        None,
        (*_KEYED, 400, 404, 409),
        ("Last-Event-ID",),
    ),
    ("DELETE", "/v1/requests/{id}"): Operation(
        "Cancels a request in flight.",
        "Text",
        {"application/json": {"schema": {"type": "object"}}},
        None,
        (*_KEYED, 400, 404),
        query=("unread", "after_s"),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Vectors of texts.", "Embeddings", json_content("Embeddings"), embeddings.BODY.schema(), _TEXT
    ),
    ("POST", "/v1/rerank"): Operation(
        "Orders documents by their similarity to a query.",
        "Embeddings",
        json_content("Ranking"),
        rerank.RERANK_BODY.schema(),
        _TEXT,
    ),
    ("POST", "/v1/score"): Operation(
        "The similarity of texts.",
        "Embeddings",
        json_content("Scores"),
        rerank.SCORE_BODY.schema(),
        _TEXT,
    ),
    ("POST", "/v1/session/close"): Operation(
        "Ends a session.", "Sessions", json_content("ClosedSession"), session_close.BODY.schema(), _TEXT
    ),
    ("POST", "/v1/tokenize"): Operation(
        "The token ids of a text, with offsets.", "Tokens", json_content("Tokens"), TOKENIZE_BODY.schema(), _TEXT
    ),
    ("POST", "/v1/detokenize"): Operation(
        "The text of token ids.", "Tokens", json_content("Text"), DETOKENIZE_BODY.schema(), _TEXT
    ),
    ("GET", "/v1/models"): Operation(
        "The models that a request may name.", "Models", json_content("Models"), None, _KEYED
    ),
    ("GET", "/v1/models/{id}"): Operation("One model.", "Models", json_content("Model"), None, (*_KEYED, 404)),
    ("GET", "/v1/engines"): Operation("Redirects to /v1/models.", "Models", {}, None, (*_KEYED, 308)),
    ("GET", "/v1/engines/{id}"): Operation("Redirects to /v1/models/ID.", "Models", {}, None, (*_KEYED, 308)),
    ("GET", "/health"): Operation("Liveness.", "State", json_content("Health")),
    ("GET", "/ready"): Operation(
        "Readiness of every stage and model.", "State", json_content("Readiness"), error="NotReady"
    ),
    ("GET", "/openapi.json"): Operation(
        "This document.", "State", {"application/json": {"schema": {"type": "object"}}}, None, (304, 500, 503)
    ),
    ("GET", "/v1/admin/state"): Operation(
        "Requests in flight, versions of models, drains.",
        "Administration",
        json_content("AdminState"),
        None,
        _KEYED,
    ),
    ("POST", "/v1/admin/drain"): _admin("drain", "Takes no more requests."),
    ("POST", "/v1/admin/resume"): _admin("resume", "Ends a drain."),
    ("POST", "/v1/admin/load"): _admin("load", "Loads a model."),
    ("POST", "/v1/admin/reload"): _admin("reload", "Replaces a model by another version of it."),
    ("POST", "/v1/admin/unload"): _admin("unload", "Unloads a model."),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "Loads an adapter, as vLLM does.", "Administration", TEXT, lora_adapters.LOAD_BODY.schema(), _ADMIN
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "Unloads an adapter, as vLLM does.", "Administration", TEXT, lora_adapters.UNLOAD_BODY.schema(), _ADMIN
    ),
    ("GET", "/lora-adapters"): Operation(
        "The adapters of a model, as llama-server lists them.",
        "Administration",
        json_content("Adapters"),
        None,
        (*_KEYED, 400, 404),
        query=("model",),
    ),
    ("POST", "/lora-adapters"): Operation(
        "Accepts scales of 0, in llama-server's format.",
        "Administration",
        json_content("AdapterScales"),
        lora_adapters.scales_schema(),
        (*_WITH_BODY, 404),
        query=("model",),
    ),
}

METRICS = Operation("Metrics in Prometheus' text format.", "State", TEXT, None, (401, 403, 500, 503))
