"""Speed of chats with a predicted text (`prediction`): an exact one, and one in which some words are changed.

The plain request, the exact prediction and the changed one alternate; the time is taken from the first token to the
last, so the prompt does not count.
"""

from __future__ import annotations

from typing import Any

from starling.bench.figures import percentile
from starling.bench.load import drive
from starling.bench.response import Response
from tools.bench.http.server_under_test import ServerUnderTest
from tools.bench.http.workload import Prompts

OUTPUT = 150  # tokens
CHANGED = 12  # one word of so many is another one
PATH = "/v1/chat/completions"


def predictions(server: ServerUnderTest, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """Tokens per second by kind, and their ratio to the plain request; whether all texts were the same."""
    speeds: dict[str, list[float]] = {"plain": [], "exact": [], "changed": []}
    is_same = True
    for number in range(rounds):
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": f"Tell me about{prompts.text(8)}."}],
            "max_tokens": OUTPUT,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text = _send(server, body).text
        predicted = {"exact": text, "changed": changed(text)}
        for kind, found in speeds.items():
            more = {"prediction": {"type": "content", "content": predicted[kind]}} if kind in predicted else {}
            response = _send(server, {**body, **more})
            found.append((response.tokens - 1) / (response.times[-1] - response.times[0]))
            is_same = is_same and response.text == text
    result: dict[str, Any] = {"same_text": is_same, "rounds": rounds}
    for kind, found in speeds.items():
        ratios = [one / plain for one, plain in zip(found, speeds["plain"], strict=True)]
        result[kind] = {
            "tokens_per_s": round(percentile(found, 0.5), 1),
            "ratio": round(percentile(ratios, 0.5), 2),
            "lowest": round(min(ratios), 2),
            "highest": round(max(ratios), 2),
        }
    return result


def changed(text: str) -> str:
    """The text with another word in the place of each twelfth one."""
    words = text.split(" ")
    return " ".join("instead" if i % CHANGED == CHANGED // 2 else word for i, word in enumerate(words))


def _send(server: ServerUnderTest, body: dict[str, Any]) -> Response:
    response = drive(server.address, [[server.request(body)._replace(path=PATH)]]).responses[0]
    if not response.is_good:
        raise RuntimeError(f"a chat failed: {response.status} {response.error}")
    return response
