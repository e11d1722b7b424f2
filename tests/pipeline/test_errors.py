"""Every code has a status, a type and a body of one shape; categories survive the wire as codes."""

from __future__ import annotations

import inspect

import pytest

from pipeline import errors
from pipeline.api.idempotency_key import other_body
from pipeline.errors import (
    CODES,
    ConfigError,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    StarlingError,
    cancelled_by_client,
)

NEVER = {"x-should-retry": "false"}

CATEGORIES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, StarlingError) and kind is not StarlingError and not kind.__name__.startswith("_")
]


def test_body_of_a_bad_request() -> None:
    error = InvalidRequest("Invalid request: temperature must be between 0.0 and 2.0", "temperature")
    assert (error.status, error.headers()) == (400, {})
    assert error.body() == {
        "error": {
            "message": "Invalid request: temperature must be between 0.0 and 2.0",
            "type": "invalid_request_error",
            "code": "INVALID_REQUEST",
            "param": "temperature",
        }
    }


def test_statuses_match_the_documentation() -> None:
    documented = {400, 401, 403, 404, 405, 409, 413, 429, 500, 501, 503, 507}
    assert {code.status for code in CODES.values()} == documented


@pytest.mark.parametrize("kind", CATEGORIES, ids=lambda kind: kind.__name__)
def test_every_category_has_its_code_and_is_in_the_docstring(kind: type[StarlingError]) -> None:
    error = kind("what happened", "field", retry_after_s=0.2)  # type: ignore[call-arg, arg-type]
    assert error.code in CODES
    assert error.status == CODES[error.code].status
    assert errors.__doc__ is not None
    assert f" {kind.__name__} " in errors.__doc__
    assert f" {error.code} " in errors.__doc__
    same = StarlingError(error.code, error.message, error.param, retry_after_s=0.2)
    assert (same.body(), same.headers(), same.status) == (error.body(), error.headers(), error.status)


def test_retry_after_is_in_whole_seconds() -> None:
    assert Overloaded("full").headers() == {"Retry-After": "1"}
    assert Overloaded("full", retry_after_s=2.1).headers() == {"Retry-After": "3"}
    assert StarlingError("DRAINING", "going down").headers() == {"Retry-After": "1"}
    assert StarlingError("TIMEOUT", "too slow").headers() == {}


def test_a_more_specific_code_keeps_the_category() -> None:
    error = InvalidRequest("too long", "prompt", code="CONTEXT_LENGTH_EXCEEDED")
    assert (error.code, error.status, error.type) == ("CONTEXT_LENGTH_EXCEEDED", 400, "invalid_request_error")
    assert isinstance(ModelNotFound("x"), NotFound)


def test_an_unknown_code_counts_as_internal() -> None:
    error = StarlingError("SOMETHING_NEW", "who knows")
    assert (error.code, error.status, error.type) == ("SOMETHING_NEW", 500, "internal_error")


def test_a_status_of_its_own() -> None:
    assert Overloaded("model queue is full", status=503).status == 503


def test_repr_has_code_message_and_param() -> None:
    assert repr(ConfigError("bad", "server.port")) == "ConfigError(CONFIG: bad, param='server.port')"


def test_what_no_attempt_mends_is_not_to_be_repeated() -> None:
    """The clients of OpenAI and Anthropic repeat 409, 429 and everything from 500 on."""
    final = {code for code in CODES if StarlingError(code, "why", retry_after_s=1.0).headers() == NEVER}
    assert final == {"QUOTA_EXHAUSTED", "NOT_IMPLEMENTED", "INSUFFICIENT_RESOURCES", "MODEL_DAMAGED"}
    assert cancelled_by_client().headers() == other_body("key").headers() == NEVER
    assert Conflict("the session has a turn in progress").headers() == {}


def test_a_message_has_no_lone_surrogate() -> None:
    """Python makes them of bytes that are not UTF-8."""
    error = InvalidRequest("Content-Type is " + b"a\xff".decode("utf-8", "surrogateescape"))
    assert error.message == str(error) == "Content-Type is a\\udcff"
