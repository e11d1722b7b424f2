"""What clients have received, for comparison, and the names of processes."""

from __future__ import annotations

import json
from typing import Any


def process(name: str, model: str) -> str:
    """The name of a stage in the status records."""
    return name.replace("worker", f"worker-{model}")


def comparable(events: list[dict[str, Any]]) -> str:
    """What a client must receive, independent of how tokens are grouped into events."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for event in events:
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for piece in event.get("choices", [event] if "index" in event else []):
            choice = choices.setdefault(piece["index"], {"text": "", "tokens": [], "logprobs": [], "finish": []})
            choice["text"] += piece.get("text") or piece.get("delta", {}).get("content") or ""
            if "tokens" in piece:
                assert piece["start"] == len(choice["tokens"])
                choice["tokens"] += piece["tokens"]
            logprobs = piece.get("logprobs") or []
            choice["logprobs"] += logprobs["content"] if isinstance(logprobs, dict) else logprobs
            if piece.get("finish_reason"):
                choice["finish"].append((piece["finish_reason"], piece.get("stop_string")))
    assert all(len(choice["finish"]) == 1 for choice in choices.values())
    usage.pop("prompt_tokens_details")
    return json.dumps([choices, usage], sort_keys=True)
