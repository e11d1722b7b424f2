"""Two kinds of load, and a run of either.

Closed loop: each client sends its next request when the response to the one before has ended; a slow server is sent
fewer requests.  Open loop: requests are due at given times, whatever the server does, and latencies count from there;
so a server, or a client, that cannot keep up makes them longer instead of hiding behind requests that were sent late
(coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import uvloop

from starling.bench.connection import Sender, Target
from starling.bench.response import UNFINISHED, ClientRequest, Response

CHECK_S = 0.05  # longest time between two calls of `meanwhile`
REFUSED_S = 0.1  # pause of a client after a failure, so that refusals do not become a storm of requests
PRECISE_S = 0.003  # the last part of a wait, which a thread sleeps: the event loop's timers have 1 ms


class Run(NamedTuple):
    """All responses of a run, in the order in which they were sent."""

    responses: list[Response]
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Duration of the run."""
        return self.ended - self.began


class Arrival(NamedTuple):
    """A request of an open loop. `at_s`: seconds from the beginning."""

    at_s: float
    request: ClientRequest


async def closed_loop(
    sender: Sender,
    clients: Iterable[Iterable[ClientRequest]],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run all clients until each has sent its requests. Clients may share one iterator."""

    async def client(requests: Iterator[ClientRequest]) -> None:
        for request in requests:
            response = await sender.send(request)
            if response.failure or response.status != 200:
                await pause(REFUSED_S)

    async with asyncio.TaskGroup() as tasks:
        for requests in clients:
            tasks.create_task(client(iter(requests)))


async def sleep_until(when: float, clock: Callable[[], float] = time.perf_counter) -> None:
    """Wait until the clock shows `when`."""
    while (left := when - clock()) > 0:
        if left > PRECISE_S:
            await asyncio.sleep(left - PRECISE_S)
        else:
            await asyncio.to_thread(time.sleep, left)


async def open_loop(
    sender: Sender,
    arrivals: Iterable[Arrival],
    began: float,
    max_in_flight: int,
    wait_until: Callable[[float], Awaitable[None]] = sleep_until,
) -> None:
    """Send each request when it is due; with `max_in_flight` of them under way, when one of those has ended."""
    free = asyncio.Semaphore(max_in_flight)

    async def send(request: ClientRequest, due: float) -> None:
        try:
            await sender.send(request, due)
        finally:
            free.release()

    async with asyncio.TaskGroup() as tasks:
        for at_s, request in arrivals:
            await wait_until(began + at_s)
            await free.acquire()
            tasks.create_task(send(request, began + at_s))


def drive(
    address: tuple[str, int],
    clients: Iterable[Iterable[ClientRequest]],
    limit_s: float = 600.0,
    meanwhile: Callable[[float], None] | None = None,
    starts: Sequence[float] = (),
) -> Run:
    """Run all clients concurrently until every request has its response or `limit_s` has passed.

    starts: for each client, seconds from the beginning to its first request; empty: all at once.
    meanwhile: called as `meanwhile(now)` whenever data has arrived, and at least every 50 ms.

    The responses are in the order of the clients.  Raises `OSError` when no server listens at `address`.
    """
    return uvloop.run(_drive(address, [list(requests) for requests in clients], limit_s, meanwhile, starts))


async def _drive(
    address: tuple[str, int],
    clients: list[list[ClientRequest]],
    limit_s: float,
    meanwhile: Callable[[float], None] | None,
    starts: Sequence[float],
) -> Run:
    look = meanwhile or (lambda now: None)
    order = {id(request): number for number, request in enumerate(one for requests in clients for one in requests)}
    async with Sender(Target(*address), limit_s, on_data=lambda response: look(time.perf_counter())) as sender:
        await sender.open(1 if starts else len(clients))

        async def watch() -> None:
            while True:
                look(time.perf_counter())
                await asyncio.sleep(CHECK_S)

        async def later(requests: list[ClientRequest], when: float) -> None:
            await sleep_until(when)
            await closed_loop(sender, [requests])

        watcher = asyncio.create_task(watch()) if meanwhile else None
        began = time.perf_counter()
        try:
            async with asyncio.timeout(limit_s):
                if starts:
                    async with asyncio.TaskGroup() as tasks:
                        for requests, at in zip(clients, starts, strict=True):
                            tasks.create_task(later(requests, began + at))
                else:
                    await closed_loop(sender, clients)
        except TimeoutError:
            for response in sender.responses:
                if not response.ended:
                    response.fail(UNFINISHED, f"not answered within {limit_s:g} s")
        finally:
            if watcher is not None:
                watcher.cancel()
        ended = time.perf_counter()
    responses = sorted(sender.parse(), key=lambda response: order[id(response.request)])
    return Run(responses, began, ended)
