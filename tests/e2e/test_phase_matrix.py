"""Every process, and every pair of them, is killed in every phase of a request, and no byte changes.

A fault plan fires in the phase itself (`phases.py`), and no prompt of a disturbed request is cached. The client
repeats the request with its `Idempotency-Key`, and resumes from its last event, so that the gateway can be killed too.

By default half of the (process, phase) combinations and every pair once; with `STARLING_KILL_MATRIX=all` (`make
kill-matrix`) every process and pair in every phase, which combines every pair with every kind of request.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.comparison import comparable, process
from tests.e2e.conftest import share_caches
from tests.e2e.phases import PHASES, plan_strike, struck
from tests.e2e.resumable import Received, persist
from tests.e2e.server import Server, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

STAGES = ("gateway", "tokenizer", "scheduler", "kv", "worker", "worker/1")
CHUNK = 32  # most tokens of a prompt in a step

PROMPT = [(i * 37) % 290 + 1 for i in range(90)]
SAMPLED: dict[str, Any] = {"ignore_eos": True, "temperature": 0.9, "seed": 3, "max_tokens": 80, "stream": True}
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {
        "prompt": PROMPT,
        **SAMPLED,
        "logprobs": 3,
        "min_p": 0.01,
        "typical_p": 0.98,
        "dry_multiplier": 0.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.02,
    },
    "whole": {"prompt": PROMPT, **SAMPLED, "logprobs": 1, "stream": False},
    "speculative": {"prompt": [5, 6, 7, 8] * 30, **SAMPLED, "temperature": 0, "speculate": 2, "max_tokens": 120},
    "preempted": {"prompt": PROMPT, **SAMPLED, "n": 16, "max_tokens": 230},
    "cached": {"prompt": PROMPT * 5, **SAMPLED, "logprobs": 0},
    "session": {"prompt": PROMPT, **SAMPLED, "session_id": ""},
    "stopped": {"prompt": PROMPT, **SAMPLED, "stop_token_ids": [17], "min_tokens": 60, "ignore_eos": False},
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


def cases() -> Iterator[tuple[tuple[str, ...], str, str, str]]:
    """(processes, phase, action, kind of request)."""
    is_whole = os.environ.get("STARLING_KILL_MATRIX") == "all"
    kinds, phases = list(KINDS), list(PHASES)
    for i, stage in enumerate(STAGES):
        for j, phase in enumerate(phases):
            if is_whole or (i + j) % 2 == 0:
                yield (stage,), phase, "kill", kinds[(i + j) % len(kinds)]
    for i, pair in enumerate(PAIRS):
        for j, phase in enumerate(phases):
            if is_whole or j == i * 3 % len(phases):
                yield pair, phase, "kill", kinds[(i + j) % len(kinds)]
    for i, stage in enumerate(STAGES):
        yield (stage,), "prefill-2", "stop", kinds[i]
    yield ("worker",), "prefill", "segv", "sampled"
    yield ("worker/1",), "prefill-2", "segv", "whole"


CASES = list(cases())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A small model with an arena of 128 pages, in which sixteen streams do not fit."""
    home = tmp_path_factory.mktemp("phases")
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"]._replace(context_length=2048))
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 1, "ranks": 2, "max_batch_size": 16}
    with Server(home, {"models": [model], "scheduler": {"max_step_tokens": CHUNK}}) as running:
        yield running
        # A scheduler counts from its start, and the last one may have had few streams.
        with ThreadPoolExecutor(2) as pool:
            streams = {"prompt": [1, 2, 3], "max_tokens": 600, "n": 8, "ignore_eos": True}
            list(pool.map(lambda seed: running.post("/v1/generate", **streams, seed=seed), range(2)))
        running.wait_metrics("starling_preemptions_total", lambda found: sum(found.values()) > 0)
        running.stop()
        assert running.leftovers() == []


def prepare(server: Server, kind: str, salt: str) -> dict[str, Any]:
    """The body of the request; what precedes it has been computed. No other request shares pages of that salt."""
    body = {**KINDS[kind], "cache_salt": salt}
    if kind == "session":
        turn = {**body, "prompt": PROMPT[:40], "stream": False}
        body["session_id"] = server.post("/v1/generate", **turn)["session_id"]
    elif kind == "cached":
        server.post("/v1/generate", **{**body, "prompt": body["prompt"][:200], "max_tokens": 1, "stream": False})
    return body


def content(received: Received) -> str:
    """What was received, without ids of sessions."""
    data = [
        {k: v for k, v in event.items() if k not in ("session_id", "id", "created")} for _, event in received.events
    ]
    if "choices" in data[0] and len(data) == 1:
        whole = data[0]
        data = [{**choice, "start": 0, "index": choice["index"]} for choice in whole["choices"]] + [
            {"usage": whole["usage"]}
        ]
    return comparable(data)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("number", "names", "phase", "action", "kind"),
    [(number, *case) for number, case in enumerate(CASES)],
    ids=[f"{'+'.join(names)}-{phase}-{action}-{kind}" for names, phase, action, kind in CASES],
)
def test_no_byte_changes(
    server: Server,
    undisturbed: dict[str, str],
    number: int,
    names: tuple[str, ...],
    phase: str,
    action: str,
    kind: str,
) -> None:
    if kind not in undisturbed:
        undisturbed[kind] = content(persist(server, "/v1/generate", prepare(server, kind, kind), kind))
    body = prepare(server, kind, f"{kind}-{number}")
    said = len(server.output)
    pids = [server.pid_of(process(name, "tiny")) for name in names]
    plan_strike(server, phase, pids, [server.pid_of("gateway"), server.pid_of("scheduler")], action)
    received = persist(server, "/v1/generate", body, f"key-{number}")
    assert content(received) == undisturbed[kind]
    assert all(map(wait_gone, pids)), "fencing kills a process that was stopped"
    strike = struck(server, phase)
    check_phase(server, phase, body, received, strike.when_ns, strike.detail, "gateway" in names, said)


def check_phase(
    server: Server,
    phase: str,
    body: dict[str, Any],
    received: Received,
    when_ns: int,
    detail: str,
    ends: bool,
    said: int,
) -> None:
    """The request was in that phase: by the scheduler's numbers, by what the client had, and by the journal."""
    before = sum(when < when_ns for when in received.times_ns)
    numbers = dict(part.split("=") for part in detail.split() if "=" in part)
    match phase:
        case "queued":
            assert (numbers["computed"], numbers["outputs"]) == ("0", "0")
        case "prefill" | "prefill-2":
            assert numbers["outputs"] == "0"
            assert int(numbers["start"]) < int(numbers["prompt"])
            assert int(numbers["count"]) <= CHUNK
        case "decode-3" | "decode-20":
            assert int(numbers["start"]) >= int(numbers["prompt"])
            assert int(numbers["outputs"]) > 0
        case "finishing":
            assert int(numbers["outputs"]) >= body["max_tokens"] - 3 or body.get("stop_token_ids")
    if phase in ("received", "admitted", "journaled", "queued", "prefill", "prefill-2"):
        assert before == 0, "the client had tokens already"
    assert before < len(received.events), "the client had the whole answer"
    if ends:
        recovered = "recovering requests that were in flight"
        if phase not in ("received", "admitted"):
            server.wait_output(recovered, since=said)
        else:
            assert not any(recovered in line for line in server.output[said:]), "the journal had the request"
        assert received.attempts > 1
