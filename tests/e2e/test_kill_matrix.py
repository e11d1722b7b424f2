"""Every stage killed at every moment of a stream: not a byte changes (the short form of the matrix)."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import pytest

from pipeline.config_schema import DEMO_MODEL
from tests.e2e.server import Server, wait_gone

pytestmark = pytest.mark.slow

TOKENS = 40
REQUEST: dict[str, Any] = {
    "prompt": "The old lighthouse keeper climbed the spiral stairs every evening, counting each step. " * 16,
    "max_tokens": TOKENS, "seed": 11, "temperature": 0.8, "top_p": 0.95, "logprobs": 2, "ignore_eos": True, "n": 2,
}  # fmt: skip
TARGETS = ("tokenizer", "scheduler", "kv", f"worker-{DEMO_MODEL}", f"worker-{DEMO_MODEL}/1")
MOMENTS = {"prefill": 0, "first": 1, "middle": TOKENS, "last": 2 * TOKENS - 1}


def comparable(events: list[dict[str, Any]]) -> str:
    """All that the client is owed, whatever the grouping of tokens into events."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for event in events:
        assert "error" not in event, event
        usage = event.get("usage", usage)
        if "index" not in event:
            continue
        choice = choices.setdefault(event["index"], {"text": "", "tokens": [], "logprobs": [], "finish": []})
        if "tokens" in event:
            assert event["start"] == len(choice["tokens"])
            choice["text"] += event["text"]
            choice["tokens"] += event["tokens"]
            choice["logprobs"] += event["logprobs"]
        if "finish_reason" in event:
            choice["finish"].append(event["finish_reason"])
    usage.pop("prompt_tokens_details")
    return json.dumps([choices, usage], sort_keys=True)


@pytest.fixture(scope="module")
def undisturbed(demo_server: Server) -> str:
    return comparable(list(demo_server.stream("/v1/generate", **REQUEST)))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", TARGETS, ids=[name.replace(f"-{DEMO_MODEL}", "") for name in TARGETS])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_the_stream_ends_with_the_bytes_it_would_have_had(
    demo_server: Server, undisturbed: str, name: str, moment: str, number: signal.Signals
) -> None:
    if number is signal.SIGSTOP and moment not in ("prefill", "middle"):
        moment = {"first": "prefill", "last": "middle"}[moment]
    pid = demo_server.pid_of(name)
    stream = demo_server.stream("/v1/generate", **REQUEST)
    events: list[dict[str, Any]] = []
    if MOMENTS[moment] == 0:
        # The request is on its way when the generator has been asked for its first event, in a thread.
        strike = threading.Timer(0.0, lambda: os.kill(pid, number))
        strike.start()
        events = list(stream)
        strike.join()
    else:
        for event in stream:
            events.append(event)
            if len(events) == MOMENTS[moment]:
                os.kill(pid, number)
    assert comparable(events) == undisturbed
    # Whoever was hit is gone for good before the next case: fencing is death.
    assert wait_gone(pid)
