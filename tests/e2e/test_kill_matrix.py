"""Every stage of the demo model is killed, stopped or crashed during a stream, and no byte changes.

Each stage and rank alone: killed at three moments, stopped at one, stopped and continued, and crashed in a kernel.
The moments are tokens that have arrived; `test_phase_matrix.py` has the phases before the first token, and pairs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.comparison import comparable, process
from tests.e2e.server import Server, wait_gone

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
MOMENTS = {"first": 1, "middle": TOKENS, "last": 2 * TOKENS - 1}  # tokens that have arrived
SUPERVISOR_CHECK_S = 0.2  # just before a supervisor checks the processes of its stage


def struck(stream: Iterator[dict[str, Any]], after: int, strike: Callable[[], None]) -> list[dict[str, Any]]:
    """All events. Calls `strike` after so many tokens."""
    events, seen = [], 0
    for event in stream:
        events.append(event)
        before, seen = seen, seen + len(event.get("tokens", "1" if "choices" in event else ""))
        if before < after <= seen:
            strike()
    assert seen >= after
    return events


def struck_in_turn(server: Server, names: Sequence[str], body: dict[str, Any], whole: str) -> list[dict[str, Any]]:
    """All events of a chat with the text `whole`: with each eighth of it that has come, the next of `names` is killed.

    Events do not count: one has the tokens of several steps where the server comes late to read them.
    """
    events: list[dict[str, Any]] = []
    received = killed = 0
    for event in server.stream("/v1/chat/completions", **body):
        events.append(event)
        received += sum(len(choice["delta"].get("content") or "") for choice in event.get("choices", ()))
        if killed < len(names) and received > (killed + 1) * len(whole) // 8:
            os.kill(server.pid_of(process(names[killed], DEMO_MODEL)), signal.SIGKILL)
            killed += 1
    assert killed == len(names), events[-1]
    return events


@pytest.fixture(scope="module")
def undisturbed(demo_server: Server) -> str:
    return comparable(list(demo_server.stream("/v1/generate", **REQUEST)))


CASES = [
    *itertools.product([signal.SIGKILL], STAGES, MOMENTS),
    *itertools.product([signal.SIGSTOP], STAGES, ["middle"]),
    *itertools.product([signal.SIGSEGV], ["worker", "worker/1"], ["middle"]),
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


def test_a_predicted_chat_outlives_the_deaths_of_scheduler_and_worker(demo_server: Server) -> None:
    """Its text and its counts of predicted tokens are those of an undisturbed one, and its text the plain one."""
    body = {
        "model": DEMO_MODEL,
        "messages": [{"role": "user", "content": "Tell me of the mountains, at length."}],
        "max_tokens": 160,
        "seed": 4,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    plain = json.loads(comparable(list(demo_server.stream("/v1/chat/completions", **body))))
    words = plain[0]["0"]["text"].split(" ")
    words[10:12] = ["something", "else"]
    body["prediction"] = {"type": "content", "content": " ".join(words)}
    expected = comparable(list(demo_server.stream("/v1/chat/completions", **body)))
    choices, usage = json.loads(expected)
    assert choices == plain[0]
    counts = usage["completion_tokens_details"]
    assert counts["accepted_prediction_tokens"] > 100
    assert counts["rejected_prediction_tokens"] > 0
    events = struck_in_turn(demo_server, ("scheduler", "worker"), body, plain[0]["0"]["text"])
    assert comparable(events) == expected


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
    whole = json.loads(expected)[0]["0"]["text"]
    events = struck_in_turn(demo_server, ("kv", "scheduler", "tokenizer", "worker/1"), body, whole)
    assert comparable(events) == expected
