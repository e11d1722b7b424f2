"""What the KV cache is worth over HTTP: shared beginnings, pages from the disk, and a server that was killed.

Starling alone, with all its stages; prompts are random token ids, so that nothing is shared by chance.  Times
to the first token are milliseconds at the client, from the request to the first bytes of its stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.bench.http.client import Answer, Ask, drive
from tools.bench.http.server_under_test import Starling

USERS = 16
SYSTEM_TOKENS, OWN_TOKENS = 400, 10
LONG_TOKENS = 2_048
KILLED_TOKENS = 2_000
LONG_PROMPTS = 5
LONG_ARENA_MB = 160  # of the demo model's pages, 3.4 prompts: the five evict each other
IDLE_S = 2.0


class Cached:
    """A server that is asked for first tokens."""

    def __init__(self, server: Starling, seed: int) -> None:
        self.server = server
        self._rng = np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        found: list[int] = self._rng.integers(300, 40_000, count).tolist()
        return found

    def ask(self, *prompts: Sequence[int]) -> list[Answer]:
        """All at once. Raises `RuntimeError` for an answer that is none."""
        asks = [[self._ask(prompt)] for prompt in prompts]
        answers = drive(self.server.address, asks).answers
        for answer in answers:
            if answer.status != 200 or answer.error or not answer.prompt_tokens:
                raise RuntimeError(f"no answer: {answer.status} {answer.error}")
        return answers

    def _ask(self, prompt: Sequence[int]) -> Ask:
        return self.server.ask(
            {
                "model": self.server.model,
                "prompt": list(prompt),
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def first_ms(answer: Answer) -> float:
    """The head of a stream is sent with its first token, which need not be text."""
    return 1e3 * (answer.parts[0][0] - answer.sent)


def spread(values: list[float]) -> dict[str, float]:
    middle = statistics.median(values)
    return {"median": round(middle, 2), "low": round(min(values), 2), "high": round(max(values), 2)}


def ratio(part: list[float], whole: list[float]) -> float:
    return round(statistics.median(part) / statistics.median(whole), 3)


def shared_beginning(cached: Cached, rounds: int) -> dict[str, Any]:
    """16 users of one system prompt, one after the other and all at once, beside prompts that share nothing."""
    alone: list[float] = []
    users: list[float] = []
    apart: list[float] = []
    together: list[float] = []
    length = SYSTEM_TOKENS + OWN_TOKENS
    for _ in range(rounds):
        system = cached.ids(SYSTEM_TOKENS)
        alone += [first_ms(cached.ask(cached.ids(length))[0]) for _ in range(3)]
        alone.append(first_ms(cached.ask(system + cached.ids(OWN_TOKENS))[0]))
        users += [first_ms(cached.ask(system + cached.ids(OWN_TOKENS))[0]) for _ in range(USERS - 1)]
        apart += map(first_ms, cached.ask(*(cached.ids(length) for _ in range(USERS))))
        system = cached.ids(SYSTEM_TOKENS)
        together += map(first_ms, cached.ask(*(system + cached.ids(OWN_TOKENS) for _ in range(USERS))))
    return {
        "first_token_uncached_ms": spread(alone),
        "first_token_shared_ms": spread(users),
        "first_token_shared_ratio": ratio(users, alone),
        "16_at_once_nothing_shared_ms": spread(apart),
        "16_at_once_shared_ms": spread(together),
        "16_at_once_shared_ratio": ratio(together, apart),
    }


def overhead(cached: Cached, rounds: int) -> dict[str, Any]:
    """CPU time of the kv stage for prompts of which nothing is cached: naming, checksums and bookkeeping."""
    begun, before = time.perf_counter(), cached.server.cpu_s()["kv"]
    time.sleep(IDLE_S)
    idle = (cached.server.cpu_s()["kv"] - before) / (time.perf_counter() - begun)
    shares = []
    for _ in range(rounds):
        begun, before = time.perf_counter(), cached.server.cpu_s()["kv"]
        (answer,) = cached.ask(cached.ids(LONG_TOKENS + 1))
        took = time.perf_counter() - begun
        if answer.cached_tokens:
            raise RuntimeError("a random prompt was cached")
        shares.append(100 * (cached.server.cpu_s()["kv"] - before - idle * took) / took)
    return {"kv_idle_percent": round(100 * idle, 2), "overhead_without_a_hit_percent": spread(shares)}


def restored(cached: Cached, rounds: int) -> dict[str, Any]:
    """Five long prompts in an arena for three, in turn: each has been spilled when it is asked again."""
    prompts = [cached.ids(LONG_TOKENS + 1) for _ in range(LONG_PROMPTS)]
    computed = [first_ms(cached.ask(prompt)[0]) for prompt in prompts]
    again = []
    for _ in range(rounds):
        for prompt in prompts:
            (answer,) = cached.ask(prompt)
            if answer.cached_tokens != LONG_TOKENS:
                raise RuntimeError(f"{answer.cached_tokens} tokens came back, {LONG_TOKENS} were spilled")
            again.append(first_ms(answer))
    return {
        "first_token_2048_computed_ms": spread(computed),
        "first_token_2048_restored_ms": spread(again),
        "restored_times_faster": round(1 / ratio(again, computed), 1),
    }


def killed(cached: Cached) -> dict[str, Any]:
    """SIGKILL of every process, a new start, and the first request."""
    prompt = cached.ids(KILLED_TOKENS)
    cached.ask(prompt)
    seconds = cached.server.kill_and_start()
    (answer,) = cached.ask(prompt)
    return {
        "after_sigkill_cached_tokens": answer.cached_tokens,
        "of_full_pages": (KILLED_TOKENS - 1) // 32 * 32,
        "after_sigkill_first_token_ms": round(first_ms(answer), 1),
        "after_sigkill_ready_s": round(seconds, 2),
    }


def measure(model: dict[str, Any], cores: list[int], rounds: int) -> dict[str, Any]:
    """All of it, on two servers: one whose arena holds everything, one that has to spill."""
    seed = time.time_ns()
    found: dict[str, Any] = {}
    roomy = {**model, "kv_cache_mb": 1024}
    with Starling(roomy, cores, {"performance": {"batch_size": USERS}}, {}) as server:
        cached = Cached(server, seed)
        cached.ask(cached.ids(100))
        found |= shared_beginning(cached, rounds)
        found |= overhead(cached, rounds)
        found |= killed(cached)
    narrow = {**model, "kv_cache_mb": LONG_ARENA_MB, "spill_mb": 1024}
    with Starling(narrow, cores, {}, {}, spill=True) as server:
        cached = Cached(server, seed + 1)
        cached.ask(cached.ids(100))
        found |= restored(cached, rounds)
    return found
