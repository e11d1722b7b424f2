"""A stream whose model is loaded for it, and whose client leaves when its request has just been admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from pipeline.api.requests import generate
from pipeline.protocol import messages as m
from stages.gateway.http import text_endpoints
from stages.gateway.http.context import CALLER, CLIENT_ID, PRINCIPAL, STARTED_AT
from stages.gateway.requests.state import RequestState
from tests.gateway.on_demand import ANN, Gateway, with_gateway


def begin_stream(
    gateway: Gateway, patch: pytest.MonkeyPatch, on_admitted: Callable[[RequestState], object], **body: Any
) -> asyncio.Task[Any]:
    """The handler of a stream. `on_admitted` is called when it is admitted, before the handler runs again."""
    service, admit = gateway.service, gateway.service.admission.admit

    async def admit_and_note(*args: Any) -> RequestState:
        state = await admit(*args)
        asyncio.get_running_loop().call_soon(on_admitted, state)
        return state

    patch.setattr(service.admission, "admit", admit_and_note)
    request = make_mocked_request("POST", "/v1/generate")
    request[CALLER], request[PRINCIPAL] = ANN, ANN.principal
    request[STARTED_AT], request[CLIENT_ID] = gateway.now, ""
    generation = generate.read({"prompt": [1, 2, 3], "max_tokens": 4, "model": "b", "stream": True, **body})
    handling = text_endpoints._admit_and_serve(request, service, generation, None)
    return asyncio.get_running_loop().create_task(handling)


def test_a_turn_of_a_client_that_leaves_then_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(gateway: Gateway) -> None:
        service, frames = gateway.service, list[m.Frame]()

        def to_kv(frame: m.Frame) -> bool:
            frames.append(frame)
            if isinstance(frame, m.SessionBegin):
                held = m.SessionHeld(frame.id, frame.session, 1, b"", frame.salt)
                asyncio.get_running_loop().call_soon(service.sessions.on_frame, held)
            return True

        monkeypatch.setattr(service.sessions, "_send_frame", to_kv)
        service.sessions.on_up(m.Hello("kv", 1, 1, 1))
        handler = begin_stream(gateway, monkeypatch, lambda state: handler.cancel(), session_id="")
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report()
        await gateway.until(handler.done)
        assert handler.cancelled()
        assert [type(frame) for frame in frames] == [m.SessionBegin, m.SessionAbort]
        assert not service.sessions._busy, "the next turn of the session would be refused"
        assert not service.relay.requests
        assert not service.timelines._open

    with_gateway(tmp_path, test)


def test_its_version_stays_loaded_until_the_request_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(gateway: Gateway) -> None:
        in_use = list[int]()
        count = gateway.service.in_flight.on_version
        handler = begin_stream(gateway, monkeypatch, lambda state: in_use.append(count(state.spec.version)))
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report()
        await gateway.until(lambda: in_use)
        assert in_use == [1], "an operator who unloads the model would end the request with an internal error"
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)

    with_gateway(tmp_path, test)
