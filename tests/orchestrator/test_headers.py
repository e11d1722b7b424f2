"""Which of a client's headers an engine gets."""

from __future__ import annotations

from aiohttp.test_utils import make_mocked_request

from stages.orchestrator.http_app import REQUEST_ID, headers_of


def test_the_trace_context_reaches_the_engine_and_the_key_does_not() -> None:
    given = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "tracestate": "a=1", "Content-Type": "x/y"}
    request = make_mocked_request("POST", "/v1/generate", {**given, "Authorization": "Bearer sk-secret"})
    request[REQUEST_ID] = ""
    assert headers_of(request) == given
