"""The in-process engine and the server give the same bytes to the same request."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from starling.embedded import Embedded
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

PROMPTS = ("The lighthouse keeper climbed the stairs and", "1, 2, 3, 4,", "def add(a, b):\n    return", "日本の首都は")


def fields(i: int) -> dict[str, Any]:
    """One of twelve different requests: greedy and sampled, with logprobs, stop strings and penalties."""
    found: dict[str, Any] = {"max_tokens": 10 + i, "seed": i, "temperature": (0, 0.8, 1.3)[i % 3]}
    if i % 2:
        found |= {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "presence_penalty": 0.3, "logprobs": 2}
    if i % 4 == 3:
        found |= {"stop": [".", "\n\n"], "skip_special_tokens": False}
    return found


def test_the_server_and_the_engine_agree(demo_server: Server) -> None:
    with Embedded.load(DEMO_MODEL, kv_cache_mb=64) as engine:
        ids = [engine.submit(PROMPTS[i % 4], **fields(i)) for i in range(12)]
        engine.run()
        for i, request_id in enumerate(ids):
            found = engine.release(request_id)
            answer = demo_server.post("/v1/generate", prompt=PROMPTS[i % 4], **fields(i))
            [choice] = answer["choices"]
            assert (found.text, list(found.tokens)) == (choice["text"], choice["tokens"])
            assert (found.finish_reason, found.stop_string) == (choice["finish_reason"], choice["stop_string"] or "")
            assert found.prompt_tokens == answer["usage"]["prompt_tokens"]
            theirs = [(one["logprob"], [top["logprob"] for top in one["top"]]) for one in choice["logprobs"] or ()]
            assert [(one.logprob, [value for _, value in one.top]) for one in found.logprobs] == theirs
        messages = [{"role": "user", "content": "Name a colour."}]
        chat = demo_server.post(
            "/v1/chat/completions", model=DEMO_MODEL, messages=messages, max_tokens=12, temperature=0
        )
        ours = engine.generate(engine.render_chat(messages), max_tokens=12, temperature=0)
        assert ours.text == chat["choices"][0]["message"]["content"]
