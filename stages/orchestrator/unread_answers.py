"""Whole answers whose clients have left before they came: what was computed of them is charged.

    without a key    the engine ends the request, and says how many tokens it has computed
    with a key       the engine goes on, because the client will repeat the request. Nothing is done until WAIT_S after
                     the last departure here: no reader takes a place at the engine. Then the engine ends the request if
                     no one has read it for so long, and says how many tokens it has, also of a complete answer that no
                     one has read; an orchestrator that delivers it charges it itself

An engine says so once.  Bounded, and for each tenant.  Without sockets.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from pipeline.api.output_tokens import RELAY, read_relay
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.forward import Forward
from stages.orchestrator.router import Route
from stages.orchestrator.upstream import Client, Unreachable, read_whole

WAIT_S = 55.0  # a little less than an engine waits for the client of a request with a key
MARGIN_S = 5  # an engine may have noticed a departure this much later
CALL_S = 5.0  # for an engine to end a request
CLOSE_S = 2.0  # for all of them when this orchestrator stops
MAX_UNREAD = 4096  # at once
MAX_OF_TENANT = 256  # as an engine has requests that are relayed and that no one reads

Charge = Callable[[int], object]  # gets the number of tokens of the answer so far


class _Told(msgspec.Struct):
    """What an engine answers."""

    cancelled: bool = False
    output_tokens: int = 0  # older releases do not say
    has_reader: bool = False


class _Unread:
    """A request; a later departure of a client of it replaces what it has."""

    def __init__(self, route: Route, forward: Forward, charge: Charge, until: float) -> None:
        self.route = route
        self.forward = forward
        self.charge = charge
        self.until = until  # s of the event loop's clock


class UnreadAnswers:
    """One per orchestrator. `wait_s`: for the repetition of a request with a key."""

    def __init__(self, client: Client, wait_s: float = WAIT_S) -> None:
        self._client = client
        self._wait_s = wait_s
        self._unread: dict[str, _Unread] = {}  # by request
        self._of_tenant: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    @property
    def count(self) -> int:
        """Requests that are not settled."""
        return len(self._tasks)

    def begin(self, route: Route, forward: Forward, charge: Charge) -> bool:
        """The client of a request has left. False: it is not charged, and the caller releases it.

        Engines of others end it with its connection, and say nothing.
        """
        engine = route.engine
        if engine is None or engine.continues_text or RELAY not in forward.headers:
            return False
        forward = msgspec.structs.replace(forward, body=b"")  # which is not sent again, and may be large
        until = asyncio.get_running_loop().time() + (self._wait_s if forward.outlives_client else 0.0)
        if (known := self._unread.get(forward.id)) is not None:
            known.route, known.forward, known.charge, known.until = route, forward, charge, until
            return True
        tenant = read_relay(forward.headers[RELAY]).tenant
        if len(self._unread) >= MAX_UNREAD or self._of_tenant[tenant] >= MAX_OF_TENANT:
            return False
        self._unread[forward.id] = unread = _Unread(route, forward, charge, until)
        self._of_tenant[tenant] += 1
        task = asyncio.get_running_loop().create_task(self._settle(unread, tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Charge what is complete, and what is being ended; other requests with keys go on at their engines."""
        self._stopping.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _settle(self, unread: _Unread, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (left := unread.until - loop.time()) > 0 and not self._stopping.is_set():
                try:
                    async with asyncio.timeout(left):
                        await self._stopping.wait()
                except TimeoutError:
                    continue  # unless another client of it has left meanwhile
        finally:
            del self._unread[unread.forward.id]
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
        told = await self._tell(unread.route, unread.forward)
        if told is not None and not (told.has_reader and unread.forward.outlives_client):
            unread.charge(told.output_tokens)

    async def _tell(self, route: Route, forward: Forward) -> _Told | None:
        """Tell an engine that no one reads a request; what it answers, None if there is nothing to charge."""
        assert route.engine is not None
        key = route.engine.engine_key
        headers = {RELAY: forward.headers[RELAY], **({"Authorization": f"Bearer {key}"} if key else {})}
        url = f"{route.engine.engine_url}/v1/requests/{forward.id}?unread=true"
        if forward.outlives_client:
            url += f"&after_s={max(0, int(self._wait_s) - MARGIN_S)}"
        try:
            async with asyncio.timeout(CALL_S):
                answer = await self._client.open("DELETE", url, headers, b"", agent_id=route.agent_id)
                try:
                    raw = await read_whole(answer)
                finally:
                    answer.close()
            return msgspec.json.decode(raw, type=_Told) if answer.status == 200 else None
        except (Unreachable, TimeoutError, *DECODE_ERRORS):
            return None
