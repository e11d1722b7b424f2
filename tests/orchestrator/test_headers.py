"""Which of a client's headers an engine gets, and which headers responses have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from pipeline.api.keys import Caller
from pipeline.api.quotas import Quotas
from pipeline.config.schema import RateLimitsConfig
from stages.orchestrator.http_app import CALLER, FRONT, REQUEST_ID, headers_of, own_headers


def test_the_trace_context_reaches_the_engine_and_the_key_does_not() -> None:
    given = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "tracestate": "a=1", "Content-Type": "x/y"}
    request = make_mocked_request("POST", "/v1/generate", {**given, "Authorization": "Bearer sk-secret"})
    request[REQUEST_ID] = ""
    assert headers_of(request) == given


def test_a_response_says_what_is_left_of_quotas() -> None:
    front: Any = SimpleNamespace(quotas=Quotas(RateLimitsConfig(requests_per_minute=60), lambda: 0.0))
    app = web.Application()
    app[FRONT] = front
    front.quotas.take_request("a")

    def headers(path: str) -> dict[str, str]:
        request = make_mocked_request("POST", path, app=app)
        request[CALLER], request[REQUEST_ID] = Caller("a", is_admin=True), "req-1"
        return own_headers(request)

    quotas = {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
    }
    plain = {"Server": "starling", "X-Request-Id": "req-1"}
    assert headers("/v1/completions") == plain | quotas
    assert headers("/v1/messages") == plain | quotas | {"Request-Id": "req-1"}
    assert headers("/v1/fleet/place") == plain  # an operator's
