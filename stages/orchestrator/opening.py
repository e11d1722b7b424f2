"""Exchanges with engines that can be ended from outside, when their agent is lost."""

from __future__ import annotations

import asyncio
from typing import Protocol

from stages.orchestrator.upstream import Answer, Unreachable


class Abortable(Protocol):
    """An exchange under way."""

    def abort(self, reason: str) -> None:
        """End it: who waits for it gets `Unreachable`."""


class Opening:
    """A request whose answer has not begun."""

    def __init__(self, task: asyncio.Task[Answer]) -> None:
        self._task = task
        self._reason = ""

    def abort(self, reason: str) -> None:
        """See `Abortable`."""
        self._reason = reason
        self._task.cancel()

    async def answer(self) -> Answer:
        """The answer's head. Raises `Unreachable`."""
        try:
            return await self._task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._reason and current is not None and not current.cancelling():
                raise Unreachable(self._reason) from None
            raise
