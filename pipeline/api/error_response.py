"""Errors as a client sees them: status, headers and a JSON body, or an event in a stream.

Every error body is `{"error": {"message", "type", "code", "param"}}`, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.api.json_body import to_json
from pipeline.errors import StarlingError


class ErrorResponse(NamedTuple):
    """An HTTP response without the connection's own headers; its content type is `json_body.CONTENT_TYPE`."""

    status: int
    headers: dict[str, str]
    body: bytes


def error_response(error: StarlingError) -> ErrorResponse:
    """Return the response that reports `error`."""
    headers = error.headers()
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorResponse(error.status, headers, to_json(error.body()))


def error_event(error: StarlingError, open_choices: Iterable[int]) -> bytes:
    """Return the data of the event that reports `error` in a stream and ends the choices `open_choices`."""
    reason = "timeout" if error.code == "TIMEOUT" else "error"
    return to_json({**error.body(), "choices": [{"index": index, "finish_reason": reason} for index in open_choices]})
