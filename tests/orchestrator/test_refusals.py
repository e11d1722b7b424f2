"""Errors with which engines refuse requests, in the forms of both APIs."""

from __future__ import annotations

import pytest

from pipeline.api.error_response import error_response
from pipeline.errors import StarlingError
from stages.orchestrator.forward import Refusal
from tests.orchestrator.loopback_engine import LoopbackEngine, keyed, relaying, response


@pytest.mark.parametrize("is_anthropic", [False, True])
async def test_a_request_whose_time_is_over_goes_to_no_other_engine(is_anthropic: bool) -> None:
    error = error_response(StarlingError("TIMEOUT", "not begun after 600 s"), is_anthropic=is_anthropic)
    late, other = LoopbackEngine(response(error.status, error.body)), LoopbackEngine(response(200))
    async with relaying(late, other) as world:
        with pytest.raises(Refusal) as raised:
            await world.relay.whole(keyed())
        assert len(late.requests) == 1 and not other.requests
    shown = raised.value.to_error()
    assert (shown.code, shown.status, shown.message) == ("TIMEOUT", 503, "not begun after 600 s")


def test_an_error_keeps_its_status() -> None:
    body = error_response(StarlingError("STORAGE_UNAVAILABLE", "the disk is full"), is_anthropic=True).body
    assert Refusal(503, {}, body).to_error().status == 503
