"""A client that reads event ids and resumes a stream after the gateway has died."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.e2e.server import POLL_S, Server


def events(server: Server, path: str, body: Any, headers: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yields (id, data) of each event until the end of the stream or of the connection."""
    connection = server.connect()
    try:
        method = "GET" if body is None else "POST"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        where = ""
        while line := response.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                where = value
            elif name == "data":
                if value == "[DONE]":
                    return
                yield where, json.loads(value)
    except http.client.IncompleteRead:
        return  # the connection ended in the middle of a chunk
    finally:
        connection.close()


def comparable(data: list[dict[str, Any]]) -> str:
    choices: dict[int, dict[str, Any]] = {}
    usage: list[int] = []
    for event in data:
        assert "error" not in event, event
        if "usage" in event:
            usage.append(event["usage"]["completion_tokens"])
            continue
        choice = choices.setdefault(event["index"], {"text": "", "tokens": [], "finish": []})
        if "tokens" in event:
            assert event["start"] == len(choice["tokens"])
            choice["text"] += event["text"]
            choice["tokens"] += event["tokens"]
        if "finish_reason" in event:
            choice["finish"].append(event["finish_reason"])
    return json.dumps([choices, usage], sort_keys=True)


def wait_answering(server: Server) -> None:
    """Connect until the gateway's successor answers."""
    deadline = time.monotonic() + 120
    while True:
        try:
            server.request("GET", "/health")
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(POLL_S)


class Received(NamedTuple):
    """What a resuming client has received: (id, data) of each event, or one whole answer without an id."""

    events: list[tuple[str, Any]]
    times_ns: list[int]  # CLOCK_MONOTONIC, of each event
    attempts: int


def persist(server: Server, path: str, body: dict[str, Any], key: str) -> Received:
    """Send a request until it is answered: with its key, and from the last event that was received on."""
    received: list[tuple[str, Any]] = []
    times: list[int] = []
    deadline = time.monotonic() + 120
    attempts = 0
    while True:
        attempts += 1
        last = received[-1][0] if received else ""
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        connection = server.connect()
        try:
            connection.request("POST", path, json.dumps(body), {**headers, **({"Last-Event-ID": last} if last else {})})
            response = connection.getresponse()
            if response.status != 200:
                answer = response.read()
                assert response.status == 503, (response.status, answer)
            elif not body.get("stream"):
                return Received([("", json.loads(response.read()))], [time.monotonic_ns()], attempts)
            elif _read_events(response, received, times):
                return Received(received, times, attempts)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        assert time.monotonic() < deadline, f"no answer after {attempts} attempts and {len(received)} events"
        wait_answering(server)


def _read_events(response: http.client.HTTPResponse, received: list[tuple[str, Any]], times: list[int]) -> bool:
    """Add the events. False: the connection ended before the stream."""
    where = received[-1][0] if received else ""
    while line := response.readline():
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            where = value
        elif name == "data" and line.endswith(b"\n"):
            if value == "[DONE]":
                return True
            received.append((where, json.loads(value)))
            times.append(time.monotonic_ns())
    return False
