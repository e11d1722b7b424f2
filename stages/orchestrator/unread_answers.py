"""Whole answers whose clients have left before they came: what was computed of them is charged.

    without a key    the engine ends the request, and says how many tokens it has computed
    with a key       the engine goes on, because the client will repeat the request: the answer is read here, for
                     READ_S at most, and then ended in the same way; a repetition that is there by then gets its answer

Bounded, and for each tenant: beyond a bound the oldest one ends at once.  Without sockets.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable

import msgspec

from pipeline.api import response_context
from pipeline.api.output_tokens import RELAY, read_relay
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.forward import Forward
from stages.orchestrator.router import Route
from stages.orchestrator.upstream import Client, Unreachable, read_whole

READ_S = 55.0  # a little less than an engine waits for the client of a request with a key
CALL_S = 5.0  # for an engine to end a request, or to give an answer that is complete
MAX_UNREAD = 1000  # at once; further ones are not charged
MAX_OF_TENANT = 16  # with keys, as at an engine
_USED = re.compile(rb'"(?:completion|output)_tokens":([0-9]{1,9})')

Charge = Callable[[int], object]  # gets the number of tokens of the answer so far


class UnreadAnswers:
    """One per orchestrator."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        self._read: defaultdict[str, list[asyncio.Event]] = defaultdict(list)  # by tenant: set to end a read

    def begin(self, route: Route, forward: Forward, charge: Charge) -> None:
        """The client of a request has left. Engines of others end it with its connection, and say nothing."""
        engine = route.engine
        if engine is None or engine.continues_text or RELAY not in forward.headers or len(self._tasks) >= MAX_UNREAD:
            return
        work = self._read_keyed if forward.outlives_client else self._end
        task = asyncio.get_running_loop().create_task(work(route, forward, charge))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Charge no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self, route: Route, forward: Forward, charge: Charge) -> None:
        """End a request, or charge its answer if it is complete."""
        raw = await self._call("DELETE", "?unread=true", route, forward, CALL_S)
        if raw is not None:
            try:
                charge(int(msgspec.json.decode(raw).get("output_tokens", 0)))  # older releases do not say
            except (*DECODE_ERRORS, AttributeError, TypeError, ValueError):
                return
        else:
            await self._charge_answer(route, forward, charge, CALL_S)

    async def _read_keyed(self, route: Route, forward: Forward, charge: Charge) -> None:
        tenant, enough = read_relay(forward.headers[RELAY]).tenant, asyncio.Event()
        mine = self._read[tenant]
        mine.append(enough)
        for one in mine[:-MAX_OF_TENANT]:
            one.set()
        reading = asyncio.ensure_future(self._charge_answer(route, forward, charge, READ_S))
        waiting = asyncio.ensure_future(enough.wait())
        try:
            await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
            is_charged = reading.done() and reading.result()
        finally:
            for future in (reading, waiting):
                future.cancel()
            await asyncio.gather(reading, waiting, return_exceptions=True)
            mine.remove(enough)
            if not mine:
                del self._read[tenant]
        if not is_charged:
            await self._end(route, forward, charge)

    async def _charge_answer(self, route: Route, forward: Forward, charge: Charge, within_s: float) -> bool:
        """Read an answer, and charge it; false if it has not come."""
        raw = await self._call("GET", "", route, forward, within_s)
        if raw is None:
            return False
        found = _USED.findall(raw)
        if found:
            charge(int(found[-1]))
        return True

    async def _call(self, method: str, query: str, route: Route, forward: Forward, within_s: float) -> bytes | None:
        """The body of an engine's answer about a request; None without one, or for an error."""
        assert route.engine is not None
        key = route.engine.engine_key
        headers = {RELAY: forward.headers[RELAY], **({"Authorization": f"Bearer {key}"} if key else {})}
        url = f"{route.engine.engine_url}/v1/requests/{forward.id}{query}"
        try:
            async with asyncio.timeout(within_s):
                answer = await self._client.open(method, url, headers, b"", agent_id=route.agent_id)
                try:
                    raw = await read_whole(answer)
                finally:
                    answer.close()
        except (Unreachable, TimeoutError):
            return None
        body, _ = response_context.split_kept(raw, answer.headers.get(response_context.KEPT_HEADER))
        return body if answer.status == 200 else None
