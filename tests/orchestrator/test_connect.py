"""The sockets of the client of engines: each address of a host has its time."""

from __future__ import annotations

import asyncio
import socket

import pytest

from stages.orchestrator import stage
from stages.orchestrator.http_client import Factory
from stages.orchestrator.stage import _connect


async def test_an_address_that_does_not_answer_leaves_time_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, found, waits, never = asyncio.get_running_loop(), [], [], asyncio.Event()
    addresses = [("fe80::1", 80, 0, socket.if_nametoindex("lo")), ("10.0.0.1", 80)]

    async def resolve(host: str, port: int, **options: int) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", one) for one in addresses]

    async def create(factory: Factory, address: str, port: int, **options: object) -> None:
        found.append(address)
        if len(found) < len(addresses):
            await never.wait()

    def timeout(delay: float | None) -> asyncio.Timeout:
        waits.append(delay)
        return bounded(0.0 if delay is not None else None)

    bounded = asyncio.timeout
    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    monkeypatch.setattr(loop, "create_connection", create)
    monkeypatch.setattr(asyncio, "timeout", timeout)
    await _connect(asyncio.Protocol, "engine", 80, None)
    assert found == ["fe80::1%lo", "10.0.0.1"] and waits == [stage.NEXT_S, None]
