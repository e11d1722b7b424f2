"""Clients that know the right answer: each request is asked once undisturbed, then again and again.

A request's *answer* is what its client is owed whatever happens: token ids, text, finish reason,
logprobs and usage; not ids, times or how much came from the cache.  The traffic is drawn from a seed:
prompts that share beginnings, greedy and sampled, with logprobs, several choices, stop strings.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = (  # noqa: SIM905
    "river stone lantern quiet harbour copper meadow signal winter thread orchard paper mirror engine "
    "salt window garden number shadow bridge letter morning compass island feather clock market"
).split()
CLIENT_TIMEOUT_S = 300


@dataclass(frozen=True)
class Answer:
    """What must be equal. One entry a choice."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    finish: tuple[str, ...]
    logprobs: str  # canonical JSON
    usage: str  # canonical JSON, without cached tokens


@dataclass
class Outcome:
    """One stream, from the client's side. Times are of the monotonic clock, s."""

    request: int  # index in the plan
    begun: float
    ended: float = 0.0
    answer: Answer | None = None
    error: str = ""
    mixed: bool = False  # its events named more than one model version
    arrivals: list[float] = field(default_factory=list)

    def longest_gap_ms(self, since: float, until: float) -> float:
        """The longest silence that overlaps [since, until]."""
        times = [self.begun, *self.arrivals, self.ended]
        gaps = [b - a for a, b in itertools.pairwise(times) if b >= since and a <= until]
        return 1000 * max(gaps, default=0.0)


def plan(count: int, seed: int, max_tokens: int, long_prompts: bool = False) -> list[dict[str, Any]]:
    """`count` different requests for /v1/generate."""
    chance = random.Random(seed)
    shared = " ".join(chance.choice(WORDS) for _ in range(80))
    requests = []
    for i in range(count):
        length = chance.choice((4, 20, 60)) * (6 if long_prompts else 1)
        words = " ".join(chance.choice(WORDS) for _ in range(length))
        body: dict[str, Any] = {
            "prompt": f"{shared} {words}" if i % 2 else words,
            "max_tokens": chance.randint(max_tokens // 2, max_tokens),
            "seed": chance.randrange(1 << 32),
            "temperature": chance.choice((0, 0.7, 1.0)),
            "ignore_eos": i % 3 != 0,
        }
        if i % 4 == 1:
            body |= {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.3}
        if i % 4 == 2:
            body["logprobs"] = 3
        if i % 5 == 3:
            body["n"] = 2
        if i % 7 == 4:
            body["stop"] = ["\n\n", ". The"]
        requests.append(body)
    return requests


class Client:
    """Asks a server; one session for all streams."""

    def __init__(self, url: str, session: aiohttp.ClientSession, key: str = "", model: str = "") -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = model

    async def ready(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def ask(self, index: int, body: dict[str, Any]) -> Outcome:
        """Stream one request to its end. Never raises for what the server does."""
        outcome = Outcome(index, time.monotonic())
        body = {**body, "stream": True} | ({"model": self._model} if self._model else {})
        try:
            async with self._session.post(
                f"{self._url}/v1/generate", json=body, headers=self._headers
            ) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    await self._read(response, outcome)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = time.monotonic()
        return outcome

    @staticmethod
    async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        texts: dict[int, list[str]] = {}
        tokens: dict[int, list[int]] = {}
        finish: dict[int, str] = {}
        logprobs: dict[int, list[Any]] = {}
        usage: dict[str, Any] = {}
        done = False
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            outcome.arrivals.append(time.monotonic())
            data = line[6:].strip()
            if data == b"[DONE]":
                done = True
                break
            event = json.loads(data)
            if "error" in event:
                outcome.error = str(event["error"].get("message", event["error"]))
                return
            if "usage" in event:
                usage = event["usage"]
            if "index" not in event:
                continue
            i = event["index"]
            if "tokens" in event:
                have = tokens.setdefault(i, [])
                if event["start"] != len(have):
                    outcome.error = f"choice {i}: token {event['start']} came after {len(have)} tokens"
                    return
                have.extend(event["tokens"])
                texts.setdefault(i, []).append(event["text"])
                logprobs.setdefault(i, []).extend(event.get("logprobs") or [])
            if event.get("finish_reason"):
                if i in finish:
                    outcome.error = f"choice {i} finished twice"
                    return
                finish[i] = event["finish_reason"]
        if not done:
            outcome.error = "the stream ended without [DONE]"
            return
        usage.pop("prompt_tokens_details", None)
        order = sorted(finish)
        outcome.answer = Answer(
            tuple("".join(texts.get(i, [])) for i in order),
            tuple(tuple(tokens.get(i, [])) for i in order),
            tuple(finish[i] for i in order),
            json.dumps([logprobs.get(i, []) for i in order], sort_keys=True),
            json.dumps(usage, sort_keys=True),
        )


class Traffic:
    """Keeps `streams` requests of the plan in flight until told to stop."""

    def __init__(self, client: Client, requests: list[dict[str, Any]], streams: int, seed: int) -> None:
        self.client = client
        self.requests = requests
        self.truth: list[Answer] = []
        self.outcomes: list[Outcome] = []
        self._streams = streams
        self._chance = random.Random(seed)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """Ask everything once, undisturbed. Raises `RuntimeError` when the server is not up to it."""
        for start in range(0, len(self.requests), self._streams):
            batch = list(enumerate(self.requests))[start : start + self._streams]
            for outcome in await asyncio.gather(*(self.client.ask(i, body) for i, body in batch)):
                if outcome.answer is None:
                    raise RuntimeError(f"the undisturbed run fails already: {outcome.error}")
                self.truth.append(outcome.answer)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._streams)]

    async def _client(self) -> None:
        while not self._stop.is_set():
            index = self._chance.randrange(len(self.requests))
            self.outcomes.append(await self.client.ask(index, self.requests[index]))
            if self.outcomes[-1].error:
                await asyncio.sleep(0.05)  # a server that refuses at once is not to be hammered

    async def finish(self) -> None:
        """No new requests; those in flight end."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def difference(self, outcome: Outcome) -> str:
        """In words: what is wrong with a stream."""
        if outcome.answer is None:
            return outcome.error
        truth, found = self.truth[outcome.request], outcome.answer
        for choice, (a, b) in enumerate(zip(truth.tokens, found.tokens, strict=False)):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            if a != b:
                return (
                    f"request {outcome.request}, choice {choice}: token {at} of {len(a)} is "
                    f"{b[at : at + 4]}, not {a[at : at + 4]}"
                )
        names = [name for name in ("texts", "tokens", "finish", "logprobs", "usage")
                 if getattr(truth, name) != getattr(found, name)]  # fmt: skip
        parts = [f"{n} {getattr(found, n)!r:.300}, not {getattr(truth, n)!r:.300}" for n in names]
        return f"request {outcome.request}: " + "; ".join(parts)

    def verdict(self, outcome: Outcome) -> str:
        """ "identical", "different" or "lost"."""
        if outcome.answer is None:
            return "lost"
        return "identical" if outcome.answer == self.truth[outcome.request] else "different"
