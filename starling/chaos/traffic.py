"""Clients that know the right answer: each request is asked once undisturbed, then again and again.

A request's *answer* is what its client is owed whatever happens: token ids, text, finish reason,
logprobs and usage; not ids, times or how much came from the cache.  The traffic is drawn from a seed:
prompts that share beginnings, greedy and sampled, with logprobs, several choices, stop strings, drafts,
chats, and sessions of two turns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

WORDS = (  # noqa: SIM905
    "river stone lantern quiet harbour copper meadow signal winter thread orchard paper mirror engine "
    "salt window garden number shadow bridge letter morning compass island feather clock market"
).split()
CLIENT_TIMEOUT_S = 300
BESIDE = 192  # tokens: the second prompt of a session, and what a chat template puts around a message
LEAST = 64  # bytes of a prompt, so that prompts differ


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
    answer: tuple[Answer, ...] | None = None  # of each turn
    error: str = ""
    arrivals: list[float] = field(default_factory=list)

    def longest_gap_ms(self, since: float, until: float) -> float:
        """The longest silence that overlaps [since, until]."""
        times = [self.begun, *self.arrivals, self.ended]
        gaps = [b - a for a, b in itertools.pairwise(times) if b >= since and a <= until]
        return 1000 * max(gaps, default=0.0)


@dataclass(frozen=True)
class Ask:
    """One request of the plan. Two turns are a session of /v1/generate, begun and closed with them."""

    path: str
    turns: tuple[dict[str, Any], ...]

    @property
    def is_session(self) -> bool:
        return len(self.turns) > 1


class Served(NamedTuple):
    """A model as the server lists it."""

    name: str
    chats: bool  # it has a chat template
    context: int  # tokens

    def room(self, max_tokens: int, max_prompt: int) -> int:
        """Bytes of a prompt that fit in any case: no token has less than one.

        Beside it there are two answers of a session, its second prompt and a template. Raises `RuntimeError`.
        """
        room = min(self.context - 2 * max_tokens - BESIDE, max_prompt or self.context)
        if room < LEAST:
            raise RuntimeError(
                f"model {self.name!r} has a context of {self.context} tokens, in which answers of {max_tokens} leave "
                f"no room for prompts of {LEAST} bytes: lower --tokens"
            )
        return room


def plan(
    count: int, seed: int, max_tokens: int, models: list[Served], long_prompts: bool = False, max_prompt: int = 0
) -> list[Ask]:
    """`count` different requests, over all `models`; `max_prompt` tokens at most are taken, 0: what the context leaves.

    Raises `RuntimeError` when a model's context is too small for such answers.
    """
    chance = random.Random(seed)
    beginning = " ".join(chance.choice(WORDS) for _ in range(80))
    requests = []
    for i in range(count):
        length = chance.choice((4, 20, 60)) * (6 if long_prompts else 1)
        words = " ".join(chance.choice(WORDS) for _ in range(length))
        served = models[i % len(models)]
        room = served.room(max_tokens, max_prompt)
        shared = beginning[: room // 2]
        body: dict[str, Any] = {
            "model": served.name,
            "prompt": (f"{shared} {words}" if i % 2 else words)[:room],
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
        if i % 6 == 2:
            # Text that repeats itself is guessed from what stands before.
            body |= {"speculate": 6, "temperature": 0, "prompt": f"{body['prompt']} {words} {words}"[:room]}
        if i % 8 == 5 and served.chats:
            requests.append(Ask("/v1/chat/completions", (_chat(body),)))
        elif i % 8 == 7:
            body.pop("n", None)
            turns = {**body, "session_id": ""}, {**body, "prompt": f" And then, {words[:80]}", "seed": body["seed"] ^ 1}
            requests.append(Ask("/v1/generate", turns))
        else:
            requests.append(Ask("/v1/generate", (body,)))
    return requests


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    """The same as a chat, with everything that OpenAI's parameters can say of it."""
    taken = ("model", "max_tokens", "seed", "temperature", "top_p", "presence_penalty", "n", "stop")
    chat = {name: body[name] for name in taken if name in body}
    messages = [{"role": "system", "content": "You answer at length."}, {"role": "user", "content": body["prompt"]}]
    wanted = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    return {**chat, "messages": messages, **wanted}


class Client:
    """Asks a server; one session for all streams."""

    def __init__(self, url: str, session: aiohttp.ClientSession, key: str = "") -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ready(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def models(self) -> list[Served]:
        """Those that are served. Raises `RuntimeError`."""
        async with self._session.get(f"{self._url}/v1/models", headers=self._headers) as response:
            if response.status != 200:
                raise RuntimeError(f"GET /v1/models: HTTP {response.status}: {(await response.text())[:200]}")
            listed = (await response.json())["data"]
        return [Served(model["id"], model["chat"], model["context_length"]) for model in listed if model["ready"]]

    async def ask(self, index: int, ask: Ask) -> Outcome:
        """Stream one request to its end, turn by turn. Never raises for what the server does."""
        outcome = Outcome(index, time.monotonic())
        answers: list[Answer] = []
        session = ""
        for body in ask.turns:
            given = {**body, "stream": True}
            if session:
                given["session_id"] = session
            reading = _Reading(outcome)
            await self._stream(ask.path, given, reading)
            if outcome.error:
                break
            session = reading.session
            answers.append(reading.answer())
        if session and not outcome.error:
            await self._close(session, ask.turns[0]["model"])
        if not outcome.error:
            outcome.answer = tuple(answers)
        outcome.ended = time.monotonic()
        return outcome

    async def _stream(self, path: str, body: dict[str, Any], reading: _Reading) -> None:
        outcome = reading.outcome
        try:
            async with self._session.post(f"{self._url}{path}", json=body, headers=self._headers) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    outcome.arrivals.append(time.monotonic())
                    data = line[6:].strip()
                    if data == b"[DONE]":
                        return
                    reading.take(json.loads(data))
                    if outcome.error:
                        return
                outcome.error = "the stream ended without [DONE]"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"

    async def _close(self, session: str, model: str) -> None:
        """The session is not wanted any more; one that is gone already is none of our business."""
        body = {"session_id": session, "model": model}
        try:
            async with self._session.post(f"{self._url}/v1/session/close", json=body, headers=self._headers):
                return
        except (aiohttp.ClientError, TimeoutError, OSError):
            return


class _Reading:
    """One streamed answer as it comes in, of either endpoint. What is wrong goes to `outcome.error`."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.session = ""
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._finish: dict[int, str] = {}
        self._logprobs: dict[int, list[Any]] = {}
        self._usage: dict[str, Any] = {}
        self._version = ""

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.outcome.error = str(event["error"].get("message", event["error"]))
            return
        self.session = event.get("session_id") or self.session
        version = event.get("system_fingerprint", "")
        if version and self._version and version != self._version:
            self.outcome.error = f"one stream of two versions, {self._version} and {version}"
            return
        self._version = version or self._version
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", [event] if "index" in event else []):
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        i = choice["index"]
        if "tokens" in choice:
            have = self._tokens.setdefault(i, [])
            if choice["start"] != len(have):
                self.outcome.error = f"choice {i}: token {choice['start']} came after {len(have)} tokens"
                return
            have.extend(choice["tokens"])
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        self._texts.setdefault(i, []).append(text)
        logprobs = choice.get("logprobs") or []
        self._logprobs.setdefault(i, []).extend(logprobs["content"] if isinstance(logprobs, dict) else logprobs)
        if choice.get("finish_reason"):
            if i in self._finish:
                self.outcome.error = f"choice {i} finished twice"
            self._finish[i] = choice["finish_reason"]

    def answer(self) -> Answer:
        usage = {name: value for name, value in self._usage.items() if name != "prompt_tokens_details"}
        order = sorted(self._finish)
        return Answer(
            tuple("".join(self._texts.get(i, [])) for i in order),
            tuple(tuple(self._tokens.get(i, [])) for i in order),
            tuple(self._finish[i] for i in order),
            json.dumps([self._logprobs.get(i, []) for i in order], sort_keys=True),
            json.dumps(usage, sort_keys=True),
        )


class Traffic:
    """Keeps `streams` requests of the plan in flight until told to stop; while pressed, `heavy` ones."""

    def __init__(self, client: Client, requests: list[Ask], streams: int, seed: int, heavy: Sequence[Ask] = ()) -> None:
        self.client = client
        self.requests = [*requests, *heavy]
        self._light = len(requests)
        self._is_pressed = False
        self.truth: list[tuple[Answer, ...]] = []
        self.outcomes: list[Outcome] = []
        self.has_sessions = True
        self._sessions = 0  # under way
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
            usual, heavy = range(self._light), range(self._light, len(self.requests))
            index = self._chance.choice(heavy if self._is_pressed else usual)
            ask = self.requests[index]
            if ask.is_session and not self.has_sessions:
                index, ask = 0, self.requests[0]
            self._sessions += ask.is_session
            self.outcomes.append(await self.client.ask(index, ask))
            self._sessions -= ask.is_session
            if self.outcomes[-1].error:
                await asyncio.sleep(0.05)  # a server that refuses at once is not to be hammered

    @property
    def can_press(self) -> bool:
        return len(self.requests) > self._light

    def press(self) -> str:
        """From now on long prompts are begun."""
        self._is_pressed = True
        return "long prompts press on the arena"

    def relent(self) -> None:
        self._is_pressed = False

    async def without_sessions(self) -> None:
        """Begin no more of them until `has_sessions` is set again; those under way end."""
        self.has_sessions = False
        while self._sessions:
            await asyncio.sleep(0.05)

    async def finish(self) -> None:
        """No new requests; those in flight end."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def difference(self, outcome: Outcome) -> str:
        """In words: what is wrong with a stream."""
        if outcome.answer is None:
            return outcome.error
        for turn, (truth, found) in enumerate(zip(self.truth[outcome.request], outcome.answer, strict=True)):
            if truth != found:
                return f"request {outcome.request}, turn {turn}{_difference(truth, found)}"
        return ""

    def verdict(self, outcome: Outcome) -> str:
        """ "identical", "different" or "lost"."""
        if outcome.answer is None:
            return "lost"
        return "identical" if outcome.answer == self.truth[outcome.request] else "different"


def _difference(truth: Answer, found: Answer) -> str:
    for choice, (a, b) in enumerate(zip(truth.tokens, found.tokens, strict=False)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if a != b:
            return f", choice {choice}: token {at} of {len(a)} is {b[at : at + 4]}, not {a[at : at + 4]}"
    names = [
        name
        for name in ("texts", "tokens", "finish", "logprobs", "usage")
        if getattr(truth, name) != getattr(found, name)
    ]
    return ": " + "; ".join(f"{n} {getattr(found, n)!r:.300}, not {getattr(truth, n)!r:.300}" for n in names)
