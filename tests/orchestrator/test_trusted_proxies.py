"""An orchestrator behind a proxy, without keys: whose requests its bounds count."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import BODY, hold

PROXY, OTHER = "127.0.0.2", "127.0.0.1"  # addresses that connect
TOTAL, SHARE = 8, 6  # requests in flight, and those of one client


def send(fleet: Fleet, stack: ExitStack, peer: str, client: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=120, source_address=(peer, 0))
    stack.callback(connection.close)
    headers = {"Content-Type": "application/json", "X-Forwarded-For": f"9.9.9.9, {client}"}
    connection.request("POST", "/v1/generate", json.dumps(BODY), headers)
    return connection


def test_bounds_apply_to_the_client_behind_the_proxy(homes: Callable[[], Path], engines: list[Server]) -> None:
    sections = {"server": {"trusted_proxies": [PROXY]}}
    fleet = Fleet(homes(), sections, max_concurrent_requests=TOTAL)
    try:
        fleet.add_agent("one", engines[0])
        hold(engines[0])
        with ExitStack() as stack:
            held = [send(fleet, stack, PROXY, "203.0.113.1") for _ in range(SHARE)]
            fleet.wait(lambda state: [one["under_way"] for one in state["agents"]] == [SHARE])
            assert send(fleet, stack, PROXY, "203.0.113.1").getresponse().status == 429
            held.append(send(fleet, stack, PROXY, "203.0.113.2"))
            fleet.wait(lambda state: [one["under_way"] for one in state["agents"]] == [SHARE + 1])
            hold(engines[0], False)
            assert [connection.getresponse().status for connection in held] == [200] * (SHARE + 1)
            # What others say of the client counts for nothing.
            hold(engines[0])
            held = [send(fleet, stack, OTHER, f"203.0.113.{number}") for number in range(SHARE)]
            fleet.wait(lambda state: [one["under_way"] for one in state["agents"]] == [SHARE])
            assert send(fleet, stack, OTHER, "203.0.113.99").getresponse().status == 429
            hold(engines[0], False)
            assert [connection.getresponse().status for connection in held] == [200] * SHARE
    finally:
        hold(engines[0], False)
        assert fleet.close() == 0, "".join(fleet.lines)
