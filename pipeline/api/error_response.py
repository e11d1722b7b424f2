"""Errors as a client sees them: status, headers and a JSON body, or an event in a stream.

An error body is `{"error": {"message", "type", "code", "param"}}`, as in OpenAI's API, or
`{"type": "error", "error": {"type", "message"}, "request_id"}`, as in Anthropic's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pipeline.api import sse
from pipeline.api.json_body import to_json
from pipeline.errors import StarlingError


class ErrorResponse(NamedTuple):
    """An HTTP response without the connection's own headers; its content type is `json_body.CONTENT_TYPE`."""

    status: int
    headers: dict[str, str]
    body: bytes


def error_response(error: StarlingError, *, is_anthropic: bool = False, request_id: str = "") -> ErrorResponse:
    """Return the response that reports `error`; only Anthropic's form has the request's id."""
    headers = error.headers()
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = anthropic_error(error, request_id) if is_anthropic else error.body()
    return ErrorResponse(error.status, headers, to_json(body))


# `type` of an error of Anthropic's API, by HTTP status.
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    417: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: StarlingError, request_id: str = "") -> dict[str, Any]:
    """Return the body of an error in Anthropic's API."""
    kind = "timeout_error" if error.code == "TIMEOUT" else ANTHROPIC_TYPES.get(error.status, "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return {**body, "request_id": request_id} if request_id else body


def error_event(error: StarlingError, open_choices: Iterable[int]) -> bytes:
    """Return the data of the event that reports `error` in a stream and ends the choices `open_choices`."""
    reason = "timeout" if error.code == "TIMEOUT" else "error"
    return to_json({**error.body(), "choices": [{"index": index, "finish_reason": reason} for index in open_choices]})


def last_events(
    error: StarlingError, open_choices: Iterable[int], *, is_anthropic: bool = False, request_id: str = ""
) -> bytes:
    """Return what ends a stream with `error`, of all endpoints but /v1/responses. See `error_response`, `error_event`.

    Anthropic's client skips an event without a name.
    """
    if is_anthropic:
        return sse.event(to_json(anthropic_error(error, request_id)), name=b"error")
    return sse.event(error_event(error, open_choices)) + sse.DONE
