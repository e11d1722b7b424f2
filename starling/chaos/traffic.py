"""Keeps requests in flight and compares each answer with the one of the undisturbed server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from starling.chaos.client import Answer, Client, Outcome
from starling.chaos.requests import ChaosRequest


class Traffic:
    """Keeps `streams` requests of the plan in flight until `finish`; under memory pressure, only `heavy` ones."""

    def __init__(
        self, client: Client, requests: list[ChaosRequest], streams: int, seed: int, heavy: Sequence[ChaosRequest] = ()
    ) -> None:
        self.client = client
        self.requests = [*requests, *heavy]
        self._light = len(requests)
        self._has_pressure = False
        self.expected: list[tuple[Answer, ...]] = []
        self.outcomes: list[Outcome] = []
        self.has_sessions = True
        self._sessions = 0  # in flight
        self._streams = streams
        self._rng = random.Random(seed)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def record_expected(self) -> None:
        """Send every request once, undisturbed. Raises `RuntimeError` if one fails."""
        for start in range(0, len(self.requests), self._streams):
            batch = list(enumerate(self.requests))[start : start + self._streams]
            for outcome in await asyncio.gather(*(self.client.send(i, request) for i, request in batch)):
                if outcome.answer is None:
                    raise RuntimeError(f"a request of the undisturbed run failed: {outcome.error}")
                self.expected.append(outcome.answer)

    def start(self) -> None:
        """Start the clients."""
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._streams)]

    async def _client(self) -> None:
        while not self._stop.is_set():
            usual, heavy = range(self._light), range(self._light, len(self.requests))
            index = self._rng.choice(heavy if self._has_pressure else usual)
            request = self.requests[index]
            if request.is_session and not self.has_sessions:
                index, request = 0, self.requests[0]
            self._sessions += request.is_session
            self.outcomes.append(await self.client.send(index, request))
            self._sessions -= request.is_session
            if self.outcomes[-1].error:
                await asyncio.sleep(0.05)  # a limit on the rate of requests that are refused at once

    @property
    def can_press(self) -> bool:
        """Are there heavy requests?"""
        return len(self.requests) > self._light

    def press(self) -> str:
        """Start only requests with long prompts from now on."""
        self._has_pressure = True
        return "long prompts evict each other from the arena"

    def release(self) -> None:
        """End the memory pressure."""
        self._has_pressure = False

    async def pause_sessions(self) -> None:
        """Start no session until `has_sessions` is set again, and wait for the end of those in flight."""
        self.has_sessions = False
        while self._sessions:
            await asyncio.sleep(0.05)

    async def finish(self) -> None:
        """Start no request any more and wait for the end of those in flight."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def difference(self, outcome: Outcome) -> str:
        """How a stream differs from the expected one; "" if it does not."""
        if outcome.answer is None:
            return outcome.error
        for turn, (expected, found) in enumerate(zip(self.expected[outcome.request], outcome.answer, strict=True)):
            if expected != found:
                return f"request {outcome.request}, turn {turn}{_difference(expected, found)}"
        return ""

    def verdict(self, outcome: Outcome) -> str:
        """ "identical", "different" or "lost"."""
        if outcome.answer is None:
            return "lost"
        return "identical" if outcome.answer == self.expected[outcome.request] else "different"


def _difference(expected: Answer, found: Answer) -> str:
    for choice, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if a != b:
            return f", choice {choice}: token {at} of {len(a)} is {b[at : at + 4]}, not {a[at : at + 4]}"
    names = [
        name
        for name in ("texts", "tokens", "finish", "logprobs", "usage")
        if getattr(expected, name) != getattr(found, name)
    ]
    return ": " + "; ".join(f"{n} {getattr(found, n)!r:.300}, not {getattr(expected, n)!r:.300}" for n in names)
