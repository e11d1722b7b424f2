"""Moves a stream to another agent while its engine goes on: it does not wait until its prompt is computed.

    pages    the successor gets the stream's KV pages, if sending them is faster than computing (page_transfers.py)
    warm     the successor is sent a copy of the request with the tokens so far, under another id, and computes prompt
             and tokens; at its first new token the copy is ended, and its pages stay in the successor's cache
    again    with the tokens that have come meanwhile, until that takes little time
    switch   the stream leaves its engine, and goes on at the successor as after a death: prompt and tokens are cached

The copy's events are not forwarded.  While no successor takes one, the stream stays where it is, as its engine can
still answer, and it is tried again.  Only a successor that cannot continue from tokens gets the stream without a copy.
Without sockets.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from pipeline.api.output_tokens import read_comment
from pipeline.errors import StarlingError
from stages.orchestrator.event_cutter import END, MAX_EVENT_BYTES
from stages.orchestrator.forward import Forward, Tries
from stages.orchestrator.output_record import OutputRecord
from stages.orchestrator.router import Route, ScoreRouter
from stages.orchestrator.upstream import Answer, Unreachable

log = logging.getLogger("starling.orchestrator")

MAX_ROUNDS = 3  # copies of one request
QUICK_S = 0.1  # to the first new token, after which another copy would gain nothing
WARM_S = 30.0  # for all copies of one request; pages of a prompt that takes longer stay cached for the next attempt
RETRY_S = 2.0  # after an attempt has failed
MAX_AT_ONCE = 4  # handovers: more copies would delay each other, and the successors' own streams

# (agent, route, request, id of its copy, output tokens): the successor may get its pages. Raises nothing.
BringPages = Callable[[str, Route, Forward, str, int], Awaitable[None]]
Send = Callable[[Route, Forward, bytes], Awaitable[Answer]]


class _CannotWarmError(Exception):
    """The successor computes a stream from its prompt alone."""


class Handovers:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self,
        router: ScoreRouter,
        send: Send,
        release: Callable[[Route, Forward], object],
        clock: Callable[[], float],
        bring_pages: BringPages | None = None,
    ) -> None:
        """`send(route, forward, output)`: to an engine. `release(route, forward)`: end it there."""
        self._router = router
        self._send = send
        self._release = release
        self._clock = clock
        self._bring_pages = bring_pages
        self._tasks: dict[object, asyncio.Task[None]] = {}  # by what is moved
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    def begin(
        self,
        moved: object,
        agent_id: str,
        forward: Forward,
        output: OutputRecord,
        tries: Tries,
        switch: Callable[[], object],
    ) -> bool:
        """Warm a successor, then call `switch`. False if that is under way for `moved`, or has just failed."""
        if moved in self._tasks:
            return False
        task = asyncio.get_running_loop().create_task(self._run(agent_id, forward, output, tries, switch))
        self._tasks[moved] = task
        task.add_done_callback(lambda done: self._tasks.pop(moved, None))
        return True

    def ended(self, moved: object) -> None:
        """It has ended by itself, or is being moved."""
        task = self._tasks.pop(moved, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, agent_id: str, forward: Forward, output: OutputRecord, tries: Tries, switch: Callable[[], object]
    ) -> None:
        async with self._turns:
            error = await self._warm_up(agent_id, forward, output, tries)
        if error is None:
            switch()
            return
        tries.successor = ""
        log.warning(
            "a stream stays at an agent that drains",
            extra={"request_id": forward.id, "agent": agent_id, "reason": str(error) or "no answer in time"},
        )
        await asyncio.sleep(RETRY_S)

    async def _warm_up(self, agent_id: str, forward: Forward, output: OutputRecord, tries: Tries) -> Exception | None:
        """Warm a successor until another copy would gain nothing. What failed, if the stream cannot go there now."""
        try:
            async with asyncio.timeout(WARM_S):
                for _ in range(MAX_ROUNDS):
                    begun = self._clock()
                    tries.successor = await self._warm(agent_id, forward, output, tries)
                    if self._clock() - begun <= QUICK_S:
                        break
        except _CannotWarmError:
            pass
        except TimeoutError as error:
            return None if tries.successor else error
        except (Unreachable, StarlingError) as error:
            return error
        return None

    async def _warm(self, agent_id: str, forward: Forward, output: OutputRecord, tries: Tries) -> str:
        """Let another agent compute the prompt and the tokens so far; which one. Raises what the exchange raises."""
        excluded = frozenset({agent_id, *tries.unfit})
        routed = msgspec.structs.replace(
            forward.routed, excluded=excluded, version=tries.version, pinned=tries.successor
        )
        route = self._router.choose(routed, "warm")
        if route.engine is None:
            raise Unreachable(f"agent {route.agent_id} has no engine with the model")
        if not route.engine.can_continue:
            raise _CannotWarmError
        copy = _copy(forward, routed)
        self._router.begin(route, copy.routed)  # now: other streams that move go elsewhere meanwhile
        try:
            if self._bring_pages is not None and route.agent_id != tries.successor:  # else it has computed most of it
                await self._bring_pages(agent_id, route, forward, copy.id, output.n_tokens)
            await self._compute(route, copy, output)
        finally:
            self._router.end(route, copy.routed)
        return route.agent_id

    async def _compute(self, route: Route, copy: Forward, output: OutputRecord) -> None:
        """Let the engine of `route` run the copy until its first new token. Raises what the exchange raises."""
        known = output.counts()
        try:
            answer = await self._send(route, copy, output.encode())
            try:
                if answer.status != 200:
                    raise Unreachable(f"agent {route.agent_id} answers with {answer.status}")
                await _read_new_token(answer, known)
            finally:
                answer.close()
        finally:
            self._release(route, copy)


def _copy(forward: Forward, routed: object) -> Forward:
    """The request under an id of its own."""
    name = f"req-{secrets.token_hex(12)}"
    headers = {key: value for key, value in forward.headers.items() if key != "Idempotency-Key"}
    headers["X-Starling-Request"] = name + headers.get("X-Starling-Request", "")[len(name) :]
    return msgspec.structs.replace(
        forward,
        routed=msgspec.structs.replace(forward.routed, request_id=name),
        headers=headers,
        last_id="",
        was_sent=False,
    )


async def _read_new_token(answer: Answer, known: list[int]) -> None:
    """Read until a choice has more tokens than it had. Raises `Unreachable`."""
    rest = b""
    while data := await answer.read():
        *blocks, rest = (rest + data).split(END)
        for block in blocks:
            found = read_comment(block)
            if found is not None:
                before = known[found.choice] if found.choice < len(known) else 0
                if found.first + len(found.tokens) > before:
                    return
        if len(rest) > MAX_EVENT_BYTES:
            raise Unreachable("an event does not end")
    raise Unreachable("the copy has ended without a new token")
