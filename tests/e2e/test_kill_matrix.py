"""Every stage is killed at every moment of a stream, and no byte changes (the short form of the matrix).

Each stage and rank alone at four moments, stopped at two, stopped and continued, and crashed in a kernel; then
each pair at once, over all kinds of requests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

TOKENS = 40
REQUEST: dict[str, Any] = {
    "prompt": "The old lighthouse keeper climbed the spiral stairs every evening, counting each step. " * 16,
    "max_tokens": TOKENS,
    "seed": 11,
    "temperature": 0.8,
    "top_p": 0.95,
    "logprobs": 2,
    "ignore_eos": True,
    "n": 2,
}
STAGES = ("tokenizer", "scheduler", "kv", "worker", "worker/1")
MOMENTS = {"prefill": 0, "first": 1, "middle": TOKENS, "last": 2 * TOKENS - 1}  # tokens that have arrived
SUPERVISOR_CHECK_S = 0.2  # just before a supervisor checks the processes of its stage


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


def struck(stream: Iterator[dict[str, Any]], after: int, strike: Callable[[], None]) -> list[dict[str, Any]]:
    """All events. Calls `strike` after so many tokens (events of a chat); 0: while the prompt is computed."""
    if not after:
        # The generator sends the request when its first event is requested, so that the strike is in a thread.
        timer = threading.Timer(0.0, strike)
        timer.start()
        events = list(stream)
        timer.join()
        return events
    events, seen = [], 0
    for event in stream:
        events.append(event)
        before, seen = seen, seen + len(event.get("tokens", "1" if "choices" in event else ""))
        if before < after <= seen:
            strike()
    assert seen >= after
    return events


@pytest.fixture(scope="module")
def undisturbed(demo_server: Server) -> str:
    return comparable(list(demo_server.stream("/v1/generate", **REQUEST)))


CASES = [
    *itertools.product([signal.SIGKILL], STAGES, MOMENTS),
    *itertools.product([signal.SIGSTOP], STAGES, ["prefill", "middle"]),
    *itertools.product([signal.SIGSEGV], ["worker", "worker/1"], ["prefill", "middle"]),
]


@pytest.mark.parametrize(("number", "name", "moment"), CASES, ids=[f"{n.name}-{s}-{m}" for n, s, m in CASES])
def test_a_killed_stage_changes_no_byte_of_a_stream(
    demo_server: Server, undisturbed: str, name: str, moment: str, number: signal.Signals
) -> None:
    pid = demo_server.pid_of(process(name, DEMO_MODEL))
    stream = demo_server.stream("/v1/generate", **REQUEST)
    assert comparable(struck(stream, MOMENTS[moment], lambda: os.kill(pid, number))) == undisturbed
    # The process has ended before the next case: fencing kills it.
    assert wait_gone(pid)


@pytest.mark.parametrize("name", ["worker", "worker/1"])
def test_a_process_that_continues_while_it_is_replaced_changes_no_byte(
    demo_server: Server, undisturbed: str, name: str
) -> None:
    """It is either killed or keeps its work."""
    pid = demo_server.pid_of(process(name, DEMO_MODEL))
    pidfd = os.pidfd_open(pid)

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    timer = threading.Timer(SUPERVISOR_CHECK_S, go_on)

    def strike() -> None:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        timer.start()

    stream = demo_server.stream("/v1/generate", **REQUEST)
    assert comparable(struck(stream, TOKENS, strike)) == undisturbed
    timer.join()
    os.close(pidfd)
    assert comparable(list(demo_server.stream("/v1/generate", **REQUEST))) == undisturbed


# ------------------------------------------------------------------ pairs, over all kinds of requests


PROMPT = [(i * 37) % 290 + 1 for i in range(90)]
SAMPLED: dict[str, Any] = {"ignore_eos": True, "temperature": 0.9, "seed": 3, "max_tokens": 240}
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"prompt": PROMPT, **SAMPLED, "logprobs": 3},
    "speculative": {"prompt": [5, 6, 7, 8] * 30, **SAMPLED, "temperature": 0, "speculate": 8},
    "preempted": {"prompt": PROMPT[:60], **SAMPLED, "n": 16, "max_tokens": 260},
    "cached": {"prompt": PROMPT * 5, **SAMPLED, "logprobs": 0},
    "session": {"prompt": PROMPT[:40], **SAMPLED, "session_id": ""},
    "stopped": {"prompt": PROMPT, **SAMPLED, "stop_token_ids": [17], "min_tokens": 120, "ignore_eos": False},
    "constrained": {
        "prompt": PROMPT,
        **SAMPLED,
        "top_k": 20,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"9": 2.0},
        "order": ["mask", "temperature", "top_k", "top_p", "penalties"],
    },
}
PAIRS = list(itertools.combinations(STAGES, 2))


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a small model with an arena of 128 pages, in which sixteen streams do not fit."""
    home = tmp_path_factory.mktemp("kinds")
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"])
    with Server(home, {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 1, "ranks": 2}]}) as server:
        yield server
        # A scheduler counts from its start, and the last one may have had few streams.
        with ThreadPoolExecutor(2) as pool:
            streams = {"prompt": [1, 2, 3], "max_tokens": 600, "n": 8, "ignore_eos": True}
            list(pool.map(lambda seed: server.post("/v1/generate", **streams, seed=seed), range(2)))
        server.wait_metrics("starling_preemptions_total", lambda found: sum(found.values()) > 0)
        server.stop()
        assert server.leftovers() == []


def turns(server: Server, kind: str) -> Iterator[dict[str, Any]]:
    """The stream that the test disturbs; for a session the second turn."""
    body = KINDS[kind]
    if kind == "session":
        first = server.post("/v1/generate", **body)
        body = {**body, "prompt": PROMPT[40:], "session_id": first["session_id"]}
    return server.stream("/v1/generate", **body)


def without_id(events: list[dict[str, Any]]) -> str:
    return comparable([{k: v for k, v in event.items() if k != "session_id"} for event in events])


@pytest.mark.parametrize(("case", "pair"), list(enumerate(PAIRS)), ids=["+".join(pair) for pair in PAIRS])
def test_two_stages_killed_at_once_change_no_byte_of_any_kind_of_request(
    tiny_server: Server, case: int, pair: tuple[str, str]
) -> None:
    kind = list(KINDS)[case % len(KINDS)]
    expected = without_id(list(turns(tiny_server, kind)))
    pids = [tiny_server.pid_of(process(name, "tiny")) for name in pair]

    def strike() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    after = 60 * KINDS[kind].get("n", 1)
    assert without_id(struck(turns(tiny_server, kind), after, strike)) == expected
    assert all(map(wait_gone, pids))


def test_a_chat_outlives_the_death_of_four_stages(demo_server: Server) -> None:
    """The stages die one after the other during one answer with log-probabilities and a stop string."""
    body = {
        "model": DEMO_MODEL,
        "messages": [{"role": "user", "content": "Tell me of the sea, at length."}],
        "max_tokens": 80,
        "seed": 2,
        "temperature": 0.7,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["\n\n\n"],
        "stream_options": {"include_usage": True},
    }
    expected = comparable(list(demo_server.stream("/v1/chat/completions", **body)))
    names = iter(("kv", "scheduler", "tokenizer", "worker/1"))

    def strike() -> None:
        os.kill(demo_server.pid_of(process(next(names), DEMO_MODEL)), signal.SIGKILL)

    events: list[dict[str, Any]] = []
    for event in demo_server.stream("/v1/chat/completions", **body):
        events.append(event)
        if len(events) in (5, 15, 25, 35):
            strike()
    assert next(names, None) is None
    assert comparable(events) == expected
