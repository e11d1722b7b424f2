"""A question that is repeated, to something that may not answer in time: an engine, or a disk.

It is asked in a task of its own.  Who wants the answer waits for it as long as `PATIENCE_S` after the question, and
afterwards uses the last one: an orchestrator drops an agent that does not answer a heartbeat within 2 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("starling.agent")

PATIENCE_S = 1.0  # half of what an orchestrator gives a heartbeat


class Look:
    """One question. Used in one event loop."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        max_age_s: float,
        clock: Callable[[], float],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """ask: stores the answer; False if there was none.  max_age_s: of an answer, from its question on."""
        self._ask = ask
        self._max_age_s = max_age_s
        self._clock = clock
        self._patience_s = patience_s
        self._asked_at = float("-inf")
        self._is_expired = True
        self._silent_since: float | None = None  # when the first question after the last answer was asked
        self._task: asyncio.Task[None] | None = None

    @property
    def silent_s(self) -> float:
        """For how long questions have been asked without an answer: what is known is at least as old."""
        return self._clock() - self._silent_since if self._silent_since is not None else 0.0

    def expire(self) -> None:
        """The answer of a question that is under way, or of an earlier one, does not count any more."""
        self._is_expired = True

    async def refresh(self) -> None:
        """Ask unless the answer is new, and wait for it. One question at a time is under way."""
        if self._task is not None:
            await self._wait(self._task)  # of an earlier caller
        if self._task is None and (self._is_expired or self._clock() >= self._asked_at + self._max_age_s):
            await self._wait(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        self._asked_at = self._clock()
        self._is_expired = False
        if self._silent_since is None:
            self._silent_since = self._asked_at
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    async def _wait(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task], timeout=max(0.0, self._asked_at + self._patience_s - self._clock()))

    async def _run(self) -> None:
        try:
            if await self._ask() is not False:
                self._silent_since = None
        except Exception:
            log.exception("internal error")
        finally:
            self._task = None
