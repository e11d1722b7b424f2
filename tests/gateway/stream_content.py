"""What a client has received by a stream, for comparison."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.http_client import Event


def joined(events: list[Event]) -> str:
    """The content of a stream, independent of how tokens were grouped into events."""
    assert events[-1].data == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    rest: list[Any] = []
    for event in events[:-1]:
        data = event.data
        assert "error" not in data, data
        if "index" not in data and not data.get("choices"):
            data = {key: value for key, value in data.items() if key not in ("id", "created")}
            kept = (*filter(lambda key: key.endswith("_tokens"), data["usage"]), "completion_tokens_details")
            data["usage"] = {key: data["usage"].get(key) for key in kept}
            rest.append(data)
            continue
        piece = data if "index" in data else data["choices"][0]
        choice = choices.setdefault(
            piece["index"], {"text": "", "calls": "", "tokens": [], "logprobs": [], "other": []}
        )
        choice["text"] += piece.get("text") or piece.get("delta", {}).get("content") or ""
        choice["calls"] += "".join(
            call["function"]["arguments"] for call in piece.get("delta", {}).get("tool_calls", [])
        )
        if "start" in piece:
            assert piece["start"] == len(choice["tokens"])
        choice["tokens"] += piece.get("tokens", [])
        logprobs = piece.get("logprobs")
        if isinstance(logprobs, dict):
            logprobs = logprobs.get("content") or list(zip(*(logprobs[key] for key in sorted(logprobs))))
        choice["logprobs"] += logprobs or []
        choice["other"] += [(k, piece[k]) for k in ("finish_reason", "stop_string") if piece.get(k)]
        choice["other"] += [("role", piece["delta"]["role"])] if "role" in piece.get("delta", {}) else []
    return json.dumps([choices, rest], sort_keys=True)
