"""Errors and server-sent events as bytes."""

from __future__ import annotations

import json

import pytest

from pipeline.api import sse
from pipeline.api.error_response import error_event, error_response, last_events
from pipeline.errors import CODES, Overloaded, StarlingError, Unauthenticated


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_response_has_the_status_and_body_of_its_code(code: str) -> None:
    response = error_response(StarlingError(code, "why", "field"))
    assert response.status == CODES[code].status
    assert json.loads(response.body) == {
        "error": {"message": "why", "type": CODES[code].type, "code": code, "param": "field"}
    }
    assert ("Retry-After" in response.headers) == CODES[code].retry
    assert ("x-should-retry" in response.headers) == CODES[code].is_final


def test_headers_depend_on_the_error() -> None:
    assert error_response(Unauthenticated("no key")).headers == {"WWW-Authenticate": "Bearer"}
    assert error_response(Overloaded("full", retry_after_s=1.2)).headers == {"Retry-After": "2"}


@pytest.mark.parametrize(("code", "reason"), [("TIMEOUT", "timeout"), ("INFERENCE", "error")])
def test_an_error_event_ends_the_open_choices(code: str, reason: str) -> None:
    body = json.loads(error_event(StarlingError(code, "why"), [0, 2]))
    assert body["error"]["code"] == code
    assert body["choices"] == [{"index": 0, "finish_reason": reason}, {"index": 2, "finish_reason": reason}]


def test_the_last_events_have_the_form_of_the_api() -> None:
    error = StarlingError("TIMEOUT", "late")
    assert last_events(error, [0, 2]) == sse.event(error_event(error, [0, 2])) + b"data: [DONE]\n\n"
    shown = b'{"type":"error","error":{"type":"timeout_error","message":"late"},"request_id":"req-1"}'
    assert last_events(error, [0], is_anthropic=True, request_id="req-1") == sse.event(shown, name=b"error")


def test_events() -> None:
    assert sse.event(b"{}") == b"data: {}\n\n"
    assert sse.event(b"{}", b"req-1:7") == b"id: req-1:7\ndata: {}\n\n"
    assert sse.retry_field(1000) == b"retry: 1000\n"
    assert sse.http_chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n"
