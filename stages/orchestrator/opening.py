"""Exchanges with engines that can be ended from outside, when their agent is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from stages.orchestrator.forward import Forward
from stages.orchestrator.releases import Releases
from stages.orchestrator.router import Route
from stages.orchestrator.upstream import Answer, Begins, Take, Unreachable


class Abortable(Protocol):
    """An exchange under way."""

    def abort(self, reason: str) -> None:
        """End it: who waits for it gets `Unreachable`."""


class Opening:
    """A request whose answer has not begun, or has not reached the task that waits for it."""

    def __init__(self, begins: Begins | None = None) -> None:
        """`begins`: takes the body as soon as the head is there."""
        self._begins = begins
        self._begun: Answer | None = None  # whose events are being counted already
        self._task: asyncio.Task[Any] | None = None
        self._reason = ""

    @property
    def has_begun(self) -> bool:
        """Whether events of the answer may have been counted before the task has run."""
        return self._begun is not None

    def begin(self, answer: Answer) -> Take | None:
        """See `Begins`."""
        take = self._begins(answer) if self._begins is not None else None
        if take is not None:
            self._begun = answer
        return take

    def abort(self, reason: str) -> None:
        """See `Abortable`. What has been counted of an answer is still delivered: only its rest is given up."""
        if self._begun is not None:
            self._begun.abort(reason)
        elif not self._reason:
            self._reason = reason
            if self._task is not None:
                self._task.cancel()

    async def answer(self, opened: Awaitable[Answer]) -> Answer:
        """The answer's head. Raises `Unreachable`."""
        # Not a task of its own, which would delay the request: the caller's is cancelled, as by `asyncio.timeout`.
        task = self._task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await opened
        except asyncio.CancelledError:
            if self._reason and task.uncancel() <= before:
                raise Unreachable(self._reason) from None
            raise
        finally:
            self._task = None


E = TypeVar("E", bound=Abortable)


class Registered(Generic[E]):
    """A context manager: the exchange is among those of its agent. Entered twice for each request, so no generator."""

    __slots__ = ("_agents", "_end", "_exchange", "_exchanges", "_forward", "_on_unread", "_releases", "_route")

    def __init__(
        self,
        agents: dict[str, dict[Abortable, Forward]],
        releases: Releases,
        route: Route,
        forward: Forward,
        exchange: E,
        end: Callable[[E], object],
        on_unread: Callable[[Route], bool] | None = None,
    ) -> None:
        """`agents`: the exchanges under way by agent. `end(exchange)` is called at last.

        `on_unread`: is called when the client has left; true: instead of a release.
        """
        self._agents = agents
        self._releases = releases
        self._route = route
        self._forward = forward
        self._exchange = exchange
        self._end = end
        self._on_unread = on_unread

    def __enter__(self) -> None:
        self._exchanges = self._agents.setdefault(self._route.agent_id, {})
        self._exchanges[self._exchange] = self._forward

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_unread = isinstance(error, asyncio.CancelledError | ConnectionError)  # the client has left
        if is_unread and self._on_unread is not None and self._on_unread(self._route):
            pass
        elif isinstance(error, Unreachable) or (is_unread and not self._forward.outlives_client):
            self._releases.begin(self._route, self._forward)
        del self._exchanges[self._exchange]
        if not self._exchanges and self._agents.get(self._route.agent_id) is self._exchanges:
            del self._agents[self._route.agent_id]
        self._end(self._exchange)
