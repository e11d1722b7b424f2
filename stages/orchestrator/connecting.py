"""Makes the connections of http_client.py: to that address of a host which answers first.

A host may have several addresses of which not all can be reached, or not as fast.  The next one is tried when one has
failed, and beside those that have not answered for `NEXT_S`: a slow address is not given up, as it may be the only
one.  The first success ends the other attempts.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from pipeline.addresses import resolve
from stages.orchestrator.engine_connection import Connection
from stages.orchestrator.http_client import CONNECT_S, Factory

MAX_ADDRESSES = 8  # that are tried for one connection
NEXT_S = 0.3  # for an address to answer, before the next one is tried, too


# `open_one(factory, address, port, context, name)`: open a connection to one address; `name`: that its certificate has.
OpenOne = Callable[[Factory, str, int, ssl.SSLContext | None, str | None], Awaitable[Connection]]


async def connect(
    open_one: OpenOne, factory: Factory, host: str, port: int, context: ssl.SSLContext | None
) -> Connection:
    """A connection to the host, by a protocol of `factory`. Raises `OSError`, `TimeoutError`."""
    loop = asyncio.get_running_loop()
    addresses = (await resolve(host, port))[:MAX_ADDRESSES]

    async def attempt(address: str) -> Connection:
        return await open_one(factory, address, port, context, host if context is not None else None)

    if len(addresses) == 1:
        return await attempt(addresses[0])
    pause_s = min(NEXT_S, CONNECT_S / len(addresses))  # the last one is tried within the client's bound, too
    attempts: list[asyncio.Task[Connection]] = []
    chosen = None
    try:
        while chosen is None:
            if len(attempts) < len(addresses):
                attempts.append(loop.create_task(attempt(addresses[len(attempts)])))
            waiting = [one for one in attempts if not one.done()]
            if not waiting:
                return attempts[-1].result()  # it raises: all have failed
            is_last = len(attempts) == len(addresses)
            await asyncio.wait(waiting, timeout=None if is_last else pause_s, return_when=asyncio.FIRST_COMPLETED)
            chosen = next((one for one in attempts if one.done() and one.exception() is None), None)
        return chosen.result()
    finally:
        others = [one for one in attempts if one is not chosen]
        for one in others:
            one.cancel()
        for ended in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(ended, Connection):  # it has connected at the same time
                ended.abort()
