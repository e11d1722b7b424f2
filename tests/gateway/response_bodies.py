"""Requests for /v1/responses whose answer is known, and the events of its streams."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, NamedTuple

from tests.gateway.http_client import HttpClient
from tests.gateway.peers import MODEL
from tests.gateway.server import Server

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS = '<tool_call>\\n{"name": "weather", "arguments": {"city": "Paris"}}\\n</tool_call>'
CUT = '<tool_call>{"name": "weather", "arguments": {"city": "Ro'


def said(say: str, **more: Any) -> dict[str, Any]:
    """A request whose answer is `say`."""
    return {"model": MODEL, "input": f"please say {say}", "tools": [TOOL], "seed": 1, "max_output_tokens": 280, **more}


def prompt(server: Server) -> str:
    """The prompt of the last request."""
    return bytes(server.peers.generator.submitted[-1].prompt[::4]).decode()


class NamedEvent(NamedTuple):
    id: str
    name: str
    data: Any


def parse_events(data: bytes) -> list[NamedEvent]:
    """Parse a stream of events. It may be cut off in an event."""
    events = []
    for block in data.decode("utf-8", "ignore").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(("retry", ":")))
        if fields:
            events.append(NamedEvent(fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return events


def read_events(
    server: HttpClient, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> list[NamedEvent]:
    """All events of a stream; without a body that of a GET."""
    given = {**body, "stream": True} if body is not None else None
    answer = server.request("GET" if body is None else "POST", path, given, headers)
    assert answer.status == 200, answer.body
    return parse_events(answer.body)


def assembled(events: list[NamedEvent]) -> dict[str, Any]:
    """The last event's response. Checks that it is what the events before it make, and their order."""
    numbers = [event.data["sequence_number"] for event in events]
    assert all(a < b for a, b in pairwise(numbers))
    assert [event.data["type"] for event in events] == [event.name for event in events]
    assert [event.name for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].data["response"]["output"] == []
    assert events[0].data["response"]["status"] == "in_progress"
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events[2:-1]:
        data = event.data
        assert data["output_index"] == len(items) - (event.name != "response.output_item.added")
        if event.name == "response.output_item.added":
            assert data["item"]["status"] == "in_progress"
            items.append(data["item"])
            texts.append("")
            continue
        if event.name == "response.output_item.done":
            assert data["item"]["id"] == items[-1]["id"]
            items[-1] = data["item"]
            continue
        assert data["item_id"] == items[-1]["id"]
        match event.name:
            case "response.content_part.added":
                assert data["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                texts[-1] += data["delta"]
            case "response.output_text.done":
                assert data["text"] == texts[-1]
            case "response.content_part.done":
                assert data["part"]["text"] == texts[-1]
            case "response.function_call_arguments.done":
                assert data["arguments"] == texts[-1]
                assert data["name"] == items[-1]["name"]
            case _:
                raise AssertionError(event.name)
    whole: dict[str, Any] = events[-1].data["response"]
    assert events[-1].name == f"response.{whole['status']}"
    assert whole["output"] == items
    for item, text in zip(items, texts, strict=True):
        assert (item["content"][0]["text"] if item["type"] == "message" else item["arguments"]) == text
    return whole
