"""A client that reads event ids and resumes a stream after the gateway has died."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.e2e.server import Server


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
    deadline = time.monotonic() + 60
    while True:
        try:
            server.request("GET", "/health")
            return
        except OSError:
            assert time.monotonic() < deadline
