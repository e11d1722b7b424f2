"""What the KV cache saves over HTTP: shared prefixes, pages restored from disk, and a server that was killed.

Measures the server under test with all its stages.  Prompts are random token ids, so that nothing is shared by
chance.  Times to the first token are milliseconds at the client, from the request to the first bytes of its stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from starling.bench.load import drive
from starling.bench.response import ClientRequest, Response
from tools.bench.http.server_under_test import ServerUnderTest

USERS = 16
SYSTEM_TOKENS, OWN_TOKENS = 400, 10
LONG_TOKENS = 2_048
KILLED_TOKENS = 2_000
LONG_PROMPTS = 5
LONG_ARENA_MB = 160  # holds 3.4 of the five prompts (demo model), so that they evict each other
IDLE_S = 2.0
WARM_S = 60.0


class Cached:
    """A server, and requests for single tokens."""

    def __init__(self, server: ServerUnderTest, seed: int) -> None:
        self.server = server
        self._rng = np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        """Random token ids."""
        found: list[int] = self._rng.integers(300, 40_000, count).tolist()
        return found

    def request(self, *prompts: Sequence[int]) -> list[Response]:
        """Send all prompts at once. Raises `RuntimeError` when one fails."""
        requests = [[self._request(prompt)] for prompt in prompts]
        responses = drive(self.server.address, requests).responses
        for response in responses:
            if response.status != 200 or response.error or not response.prompt_tokens:
                raise RuntimeError(f"a request failed: {response.status} {response.error}")
        return responses

    def _request(self, prompt: Sequence[int]) -> ClientRequest:
        return self.server.request(
            {
                "model": self.server.model,
                "prompt": list(prompt),
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def first_ms(response: Response) -> float:
    """Time to the first bytes: the head of a stream is sent with its first token, which may have no text."""
    return 1e3 * (response.head_at - response.sent)


def spread(values: list[float]) -> dict[str, float]:
    """Median and range of `values`."""
    middle = statistics.median(values)
    return {"median": round(middle, 2), "low": round(min(values), 2), "high": round(max(values), 2)}


def ratio(part: list[float], whole: list[float]) -> float:
    """Median of `part` divided by median of `whole`."""
    return round(statistics.median(part) / statistics.median(whole), 3)


def shared_beginning(cached: Cached, rounds: int) -> dict[str, Any]:
    """16 users of one system prompt, in sequence and at once, compared with prompts that share nothing."""
    alone: list[float] = []
    users: list[float] = []
    apart: list[float] = []
    together: list[float] = []
    length = SYSTEM_TOKENS + OWN_TOKENS
    for _ in range(rounds):
        system = cached.ids(SYSTEM_TOKENS)
        alone += [first_ms(cached.request(cached.ids(length))[0]) for _ in range(3)]
        alone.append(first_ms(cached.request(system + cached.ids(OWN_TOKENS))[0]))
        users += [first_ms(cached.request(system + cached.ids(OWN_TOKENS))[0]) for _ in range(USERS - 1)]
        apart += map(first_ms, cached.request(*(cached.ids(length) for _ in range(USERS))))
        system = cached.ids(SYSTEM_TOKENS)
        together += map(first_ms, cached.request(*(system + cached.ids(OWN_TOKENS) for _ in range(USERS))))
    return {
        "first_token_uncached_ms": spread(alone),
        "first_token_shared_ms": spread(users),
        "first_token_shared_ratio": ratio(users, alone),
        "16_at_once_nothing_shared_ms": spread(apart),
        "16_at_once_shared_ms": spread(together),
        "16_at_once_shared_ratio": ratio(together, apart),
    }


def overhead(cached: Cached, rounds: int) -> dict[str, Any]:
    """CPU time of the kv stage for prompts without cached pages: hashes, checksums and bookkeeping."""
    begun, before = time.perf_counter(), cached.server.cpu_s()["kv"]
    time.sleep(IDLE_S)
    idle = (cached.server.cpu_s()["kv"] - before) / (time.perf_counter() - begun)
    shares = []
    for _ in range(rounds):
        begun, before = time.perf_counter(), cached.server.cpu_s()["kv"]
        (response,) = cached.request(cached.ids(LONG_TOKENS + 1))
        took = time.perf_counter() - begun
        if response.cached_tokens:
            raise RuntimeError("a random prompt was cached")
        shares.append(100 * (cached.server.cpu_s()["kv"] - before - idle * took) / took)
    return {"kv_idle_percent": round(100 * idle, 2), "overhead_without_a_hit_percent": spread(shares)}


def restored(cached: Cached, rounds: int) -> dict[str, Any]:
    """Five long prompts in turn, in an arena for three: each has been spilled when it is sent again."""
    prompts = [cached.ids(LONG_TOKENS + 1) for _ in range(LONG_PROMPTS)]
    computed = [first_ms(cached.request(prompt)[0]) for prompt in prompts]
    again = []
    for _ in range(rounds):
        for prompt in prompts:
            (response,) = cached.request(prompt)
            if response.cached_tokens != LONG_TOKENS:
                raise RuntimeError(f"{response.cached_tokens} tokens were restored, {LONG_TOKENS} were spilled")
            again.append(first_ms(response))
    return {
        "first_token_2048_computed_ms": spread(computed),
        "first_token_2048_restored_ms": spread(again),
        "restored_times_faster": round(1 / ratio(again, computed), 1),
    }


def killed(cached: Cached) -> dict[str, Any]:
    """The first request after SIGKILL to every process and a new start."""
    prompt = cached.ids(KILLED_TOKENS)
    cached.request(prompt)
    seconds = cached.server.kill_and_start()
    (response,) = cached.request(prompt)
    return {
        "after_sigkill_cached_tokens": response.cached_tokens,
        "of_full_pages": (KILLED_TOKENS - 1) // 32 * 32,
        "after_sigkill_first_token_ms": round(first_ms(response), 1),
        "after_sigkill_ready_s": round(seconds, 2),
    }


def restarted(model: dict[str, Any], cores: list[int], warm_mb: int, seed: int) -> list[float]:
    """Times to the first token of prompts whose pages a clean stop saved, after a start that has had time to warm."""
    settings = {"cache": {"persist_mb": 512, "warm_mb": warm_mb}}
    with ServerUnderTest({**model, "kv_cache_mb": 512}, cores, settings, {}) as server:
        cached = Cached(server, seed)
        prompts = [cached.ids(LONG_TOKENS + 1) for _ in range(LONG_PROMPTS)]
        for prompt in prompts:
            cached.request(prompt)
        server.stop_and_start()
        wanted = LONG_PROMPTS * LONG_TOKENS // 32 if warm_mb else 0
        deadline = time.monotonic() + WARM_S
        while server.metric("starling_kv_cache_warmed_pages_total") < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the pages were not warmed in {WARM_S:.0f} s")
            time.sleep(0.1)
        for _ in range(3):
            cached.request(cached.ids(100))
        responses = [cached.request(prompt)[0] for prompt in prompts]
        if any(response.cached_tokens != LONG_TOKENS for response in responses):
            raise RuntimeError("a prompt was not cached after the restart")
        return [first_ms(response) for response in responses]


def measure(model: dict[str, Any], cores: list[int], rounds: int) -> dict[str, Any]:
    """All figures: of a server whose arena holds every prompt, of one that spills, of some that are restarted."""
    seed = time.time_ns()
    found: dict[str, Any] = {}
    roomy = {**model, "kv_cache_mb": 1024}
    with ServerUnderTest(roomy, cores, {"performance": {"batch_size": USERS}}, {}) as server:
        cached = Cached(server, seed)
        cached.request(cached.ids(100))
        found |= shared_beginning(cached, rounds)
        found |= overhead(cached, rounds)
        found |= killed(cached)
    narrow = {**model, "kv_cache_mb": LONG_ARENA_MB, "spill_mb": 1024}
    with ServerUnderTest(narrow, cores, {}, {}, spill=True) as server:
        cached = Cached(server, seed + 1)
        cached.request(cached.ids(100))
        found |= restored(cached, rounds)
    for name, warm_mb in (("from_disk", 0), ("warmed", 512)):
        times = [one for i in range(rounds) for one in restarted(model, cores, warm_mb, seed + 2 + i)]
        found[f"first_token_2048_after_restart_{name}_ms"] = spread(times)
    return found
