"""A streaming client, and the answer that it must receive whatever faults occur.

The client outlives the gateway: each turn has an `Idempotency-Key`, with which it is sent again when its connection
ends too early, from the last event that was received on (`Last-Event-ID`) or, if there is none, from the beginning.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from starling.chaos.requests import ChaosRequest, ServedModel

CLIENT_TIMEOUT_S = 300
RESUME_S = 60.0  # from the end of a connection until its stream counts as lost
RETRY_S = 0.05  # between two attempts to connect
READY_S = 10.0  # for a server that answers to be ready at the start, as its requests wait for a stage


@dataclass(frozen=True)
class Answer:
    """What a client must receive whatever faults occur: one entry for each choice.

    Ids, times and the number of cached tokens are not part of it.
    """

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    finish: tuple[str, ...]
    logprobs: str  # canonical JSON
    usage: str  # canonical JSON, without cached tokens


@dataclass
class Outcome:
    """One stream as its client received it. Times are those of the monotonic clock, in seconds."""

    request: int  # index in the plan
    begun: float
    ended: float = 0.0
    answer: tuple[Answer, ...] | None = None  # one for each turn; None after an error
    error: str = ""
    resumed: int = 0  # connections that ended early, whose stream was continued
    arrivals: list[float] = field(default_factory=list)

    def longest_gap_ms(self, since: float, until: float) -> float:
        """The longest time without an event that overlaps [since, until]."""
        times = [self.begun, *self.arrivals, self.ended]
        gaps = [b - a for a, b in itertools.pairwise(times) if b >= since and a <= until]
        return 1000 * max(gaps, default=0.0)


class Client:
    """Sends requests to a server; all streams share one HTTP session."""

    def __init__(self, url: str, session: aiohttp.ClientSession, key: str = "") -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ready(self) -> bool:
        """Does /ready answer 200?"""
        try:
            return await self._ready_status() == 200
        except aiohttp.ClientError:
            return False

    async def _ready_status(self) -> int:
        async with self._session.get(f"{self._url}/ready") as response:
            return response.status

    async def models_when_ready(self) -> list[ServedModel]:
        """As `models`, when the server is ready: a stage of a busy machine may be silent for a moment.

        [] if nothing listens, or nothing is ready within `READY_S`. Raises `RuntimeError`.
        """
        deadline = time.monotonic() + READY_S
        while True:
            try:
                # Another stage may be silent by the time of the list, which then has no model that is ready.
                if await self._ready_status() == 200 and (models := await self.models()):
                    return models
            except aiohttp.ClientConnectorError:
                return []
            except aiohttp.ClientError:
                pass  # the gateway has ended: its successor takes the next connection
            if time.monotonic() >= deadline:
                return []
            await asyncio.sleep(RETRY_S)

    async def models(self) -> list[ServedModel]:
        """The models that are ready. Raises `RuntimeError`."""
        async with self._session.get(f"{self._url}/v1/models", headers=self._headers) as response:
            if response.status != 200:
                raise RuntimeError(f"GET /v1/models: HTTP {response.status}: {(await response.text())[:200]}")
            listed = (await response.json())["data"]
        return [ServedModel(model["id"], model["chat"], model["context_length"]) for model in listed if model["ready"]]

    async def send(self, index: int, request: ChaosRequest) -> Outcome:
        """Stream one request to its end, turn by turn. An error of the server is in the outcome and is not raised."""
        outcome = Outcome(index, time.monotonic())
        answers: list[Answer] = []
        session = ""
        for body in request.turns:
            fields = {**body, "stream": True}
            if session:
                fields["session_id"] = session
            reader = _StreamReader(outcome)
            await self._stream(request.path, fields, reader)
            if outcome.error:
                break
            session = reader.session
            answers.append(reader.answer())
        if session and not outcome.error:
            await self._close(session, request.turns[0]["model"])
        if not outcome.error:
            outcome.answer = tuple(answers)
        outcome.ended = time.monotonic()
        return outcome

    async def _stream(self, path: str, body: dict[str, Any], reader: _StreamReader) -> None:
        outcome = reader.outcome
        headers = {**self._headers, "Idempotency-Key": uuid.uuid4().hex}
        lost_at = 0.0
        while True:
            received = len(outcome.arrivals)
            ended = await self._attempt(path, body, headers, reader)
            if ended is None:
                return
            now = time.monotonic()
            if not lost_at or len(outcome.arrivals) > received:
                lost_at = now
                outcome.resumed += 1
            elif now - lost_at > RESUME_S:
                outcome.error = f"not continued within {RESUME_S:.0f} s: {ended}"
                return
            await asyncio.sleep(RETRY_S)

    async def _attempt(
        self, path: str, body: dict[str, Any], headers: dict[str, str], reader: _StreamReader
    ) -> str | None:
        """One connection. Returns how it ended too early, or None if the stream has ended, if with an error."""
        outcome = reader.outcome
        if not reader.last_id:
            reader.restart()
        resumed = {"Last-Event-ID": reader.last_id} if reader.last_id else {}
        try:
            async with self._session.post(f"{self._url}{path}", json=body, headers=headers | resumed) as response:
                if response.status == 404 and resumed:
                    reader.last_id = ""  # the gateway could not journal the request: it is sent again
                    return "the request is unknown"
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return None
                where = reader.last_id
                async for line in response.content:
                    if not line.endswith(b"\n"):
                        break
                    if line.startswith(b"id: "):
                        where = line[4:].strip().decode()
                    if not line.startswith(b"data: "):
                        continue
                    outcome.arrivals.append(time.monotonic())
                    data = line[6:].strip()
                    if data == b"[DONE]":
                        return None
                    reader.add(json.loads(data))
                    reader.last_id = where
                    if outcome.error:
                        return None
                return "the stream ended without [DONE]"
        except TimeoutError as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return None
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    async def _close(self, session: str, model: str) -> None:
        """Close the session. It may be gone already, which is not an error here."""
        body = {"session_id": session, "model": model}
        try:
            async with self._session.post(f"{self._url}/v1/session/close", json=body, headers=self._headers):
                return
        except (aiohttp.ClientError, TimeoutError, OSError):
            return


class _StreamReader:
    """Collects one streamed answer of either endpoint. An inconsistent event sets `outcome.error`."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.last_id = ""  # of the last event with one
        self.session = ""
        self.restart()

    def restart(self) -> None:
        """Forget what was received: the stream begins again."""
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._finish: dict[int, str] = {}
        self._logprobs: dict[int, list[Any]] = {}
        self._usage: dict[str, Any] = {}
        self._version = ""

    def add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.outcome.error = str(event["error"].get("message", event["error"]))
            return
        self.session = event.get("session_id") or self.session
        version = event.get("system_fingerprint", "")
        if version and self._version and version != self._version:
            self.outcome.error = f"one stream mixes two versions, {self._version} and {version}"
            return
        self._version = version or self._version
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", [event] if "index" in event else []):
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        i = choice["index"]
        if "tokens" in choice:
            tokens = self._tokens.setdefault(i, [])
            if choice["start"] != len(tokens):
                self.outcome.error = f"choice {i}: token {choice['start']} came after {len(tokens)} tokens"
                return
            tokens.extend(choice["tokens"])
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
