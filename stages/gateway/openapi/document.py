"""The OpenAPI 3.1 document of an application's routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pipeline.api.item_pages import DEFAULT_LIMIT, MAX_LIMIT
from pipeline.api.json_schema import Schema
from stages.gateway.http.administration import needs_key
from stages.gateway.openapi.examples import EXAMPLES, Example
from stages.gateway.openapi.field_texts import FIELD_TEXTS
from stages.gateway.openapi.operations import METRICS, OPERATIONS, STATUSES, Operation
from stages.gateway.openapi.responses import SCHEMAS, json_content
from stages.gateway.requests.readers import CLAIM_S

VERSION = "1"  # of the API: the v1 in its paths
_PARAMETER = re.compile(r"\{(\w+)[^}]*\}")

# Where an API key is sent (pipeline/api/keys.py): in either header.
SECURITY_SCHEMES: dict[str, Schema] = {
    "key": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
KEYS: list[dict[str, list[str]]] = [{name: []} for name in SECURITY_SCHEMES]

HEADERS: dict[str, Schema] = {
    "Idempotency-Key": {
        "description": "Another request with the same key and body attaches to the first one's answer.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"},
    },
    "Last-Event-ID": {
        "description": "The id of the last event that the client has: the stream continues after it.",
        "schema": {"type": "string", "maxLength": 4096},
    },
    "Anthropic-Version": {
        "description": "The version of Anthropic's API, a date.",
        "schema": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    },
}

QUERY: dict[str, Schema] = {
    "model": {
        "description": "The name of a model; the default is the first one.",
        "schema": {"type": "string", "maxLength": 256},
    },
    "after": {"description": "The id of the item before the page.", "schema": {"type": "string"}},
    "limit": {
        "description": "How many items a page has at most.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    },
    "order": {
        "description": "The order of the items, by their place in the list.",
        "schema": {"enum": ["asc", "desc"], "default": "desc"},
    },
    "stream": {"description": "true: the events of the response.", "schema": {"type": "boolean", "default": False}},
    "starting_after": {
        "description": "The sequence_number of the last event that the client has; -1: none.",
        "schema": {"type": "integer", "minimum": -1, "default": -1},
    },
    "unread": {"description": "true: the request ends when no client reads it.", "schema": {"const": "true"}},
    "after_s": {
        "description": "With unread: only if no client has read it for so many seconds.",
        "schema": {"type": "integer", "minimum": 0, "maximum": int(CLAIM_S), "default": 0},
    },
}


def make_document(routes: Iterable[tuple[str, str, str]], *, metrics_path: str, needs_key: bool) -> dict[str, Any]:
    """Return the document. `routes`: method, path with parameters in braces, and the docstring of the handler."""
    paths: dict[str, dict[str, Any]] = {}
    for method, pattern, docstring in routes:
        path = _PARAMETER.sub(r"{\1}", pattern)
        operation = METRICS if path == metrics_path else OPERATIONS.get((method, path)) or _generic(method, docstring)
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Starling",
            "version": VERSION,
            "description": "An inference server for large language models.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "security": KEYS if needs_key else [{}, *KEYS],
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": SECURITY_SCHEMES,
        },
    }


def _generic(method: str, docstring: str) -> Operation:
    """An operation of which only the handler's docstring is known."""
    has_body = method in ("POST", "PUT", "PATCH")
    summary = docstring.strip().partition("\n")[0] or "No description."
    answer = {"application/json": {"schema": {"type": "object"}}}
    statuses = (400, 401, 403, 404, 408, 409, 413, 429, 500, 503, 507)
    return Operation(summary, "Other", answer, {"type": "object"} if has_body else None, statuses)


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    example = EXAMPLES.get((method, path), Example())
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', path).rstrip('_')}",
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation, example.answer),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]
    parameters += [{"name": name, "in": "header", **HEADERS[name]} for name in operation.headers]
    parameters += [{"name": name, "in": "query", **QUERY[name]} for name in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = _with_texts(operation.body)
        content = {"schema": schema} if example.request is None else {"schema": schema, "example": example.request}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    if not needs_key(path):
        described["security"] = []
    return described


def _responses(operation: Operation, example: dict[str, Any] | list[Any] | None) -> dict[str, Any]:
    error = json_content(operation.error)
    responses: dict[str, Any] = {}
    for status in sorted({*([200] if operation.content else []), *operation.statuses}):
        response: dict[str, Any] = {"description": STATUSES[status]}
        if status == 200:
            response["content"] = dict(operation.content)
            if example is not None:
                response["content"]["application/json"] = {**operation.content["application/json"], "example": example}
        elif status >= 400:
            response["content"] = error
        responses[str(status)] = response
    return responses


def _with_texts(body: Schema) -> Schema:
    """Return the schema of a body with a sentence on each of its fields."""
    properties = {}
    for name, schema in body.get("properties", {}).items():
        text = FIELD_TEXTS.get(name)
        properties[name] = {**schema, "description": text} if text and "not supported" not in str(schema) else schema
    return {**body, "properties": properties} if properties else body
