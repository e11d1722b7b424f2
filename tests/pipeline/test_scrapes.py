"""However many clients ask for metrics, they are rendered once at a time, for all of them, and seldom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from pipeline.observe.scrapes import MAX_PAUSE_S, PAUSE, Scrapes, Variant

SUMS, TENANTS = Variant(False), Variant(True)
AT_ONCE = Variant(True, is_paced=False)


class Renderer:
    """Bodies that are the number of the rendering, each of `takes_s` on the clock, when `go` lets it end."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes_s = 0.0
        self.made: list[Variant] = []
        self.pauses: list[float] = []
        self.fails = False
        self.threads: set[int] = set()
        self.go = threading.Event()
        self.go.set()
        self.begun: asyncio.Event | None = None
        self.pausing: asyncio.Event | None = None
        self.resume: asyncio.Event | None = None
        self.scrapes = Scrapes(self._prepare, lambda: self.now, self._pause)

    def _prepare(self, variant: Variant) -> Callable[[], bytes]:
        self.made.append(variant)
        if self.begun is not None:
            self.begun.set()
        number = len(self.made)

        def text() -> bytes:
            self.threads.add(threading.get_ident())
            assert self.go.wait(60)
            self.now += self.takes_s
            if self.fails:
                raise ValueError("no text")
            return b"%d" % number

        return text

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(round(seconds, 6))
        self.now += seconds
        await asyncio.sleep(0)
        if self.pausing is not None and self.resume is not None:
            self.pausing.set()
            await self.resume.wait()


@pytest.fixture
def renderer() -> Renderer:
    return Renderer()


async def test_one_body_is_for_all_who_wait_and_is_not_older_than_a_request(renderer: Renderer) -> None:
    renderer.go.clear()
    renderer.begun = asyncio.Event()
    first = [asyncio.create_task(renderer.scrapes.body(SUMS)) for _ in range(30)]
    await renderer.begun.wait()
    later = [asyncio.create_task(renderer.scrapes.body(SUMS)) for _ in range(30)]
    await asyncio.sleep(0)
    renderer.go.set()
    assert await asyncio.gather(*first, *later) == [b"1"] * 30 + [b"2"] * 30
    assert threading.get_ident() not in renderer.threads


async def test_variants_take_turns(renderer: Renderer) -> None:
    bodies = await asyncio.gather(*(renderer.scrapes.body(one) for one in (SUMS, TENANTS, SUMS, TENANTS)))
    assert bodies == [b"1", b"2", b"1", b"2"]
    assert renderer.made == [SUMS, TENANTS]


@pytest.mark.parametrize(("takes_s", "pause_s"), [(0.01, PAUSE * 0.01), (0.5, MAX_PAUSE_S)])
async def test_rendering_takes_a_part_of_the_time(renderer: Renderer, takes_s: float, pause_s: float) -> None:
    renderer.takes_s = takes_s
    for variant in (SUMS, SUMS, TENANTS):
        await renderer.scrapes.body(variant)
    assert renderer.pauses == [0.0, pause_s, pause_s]
    renderer.now += 60
    await renderer.scrapes.body(SUMS)
    assert renderer.pauses[-1] == 0.0, "a scraper that comes seldom does not wait"


async def test_some_are_next_after_the_rendering_under_way(renderer: Renderer) -> None:
    renderer.go.clear()
    renderer.begun = asyncio.Event()
    paced = [asyncio.create_task(renderer.scrapes.body(SUMS))]
    await renderer.begun.wait()
    paced += [asyncio.create_task(renderer.scrapes.body(one)) for one in (TENANTS, SUMS)]
    at_once = [asyncio.create_task(renderer.scrapes.body(AT_ONCE)) for _ in range(2)]
    await asyncio.sleep(0)
    renderer.go.set()
    assert await asyncio.gather(*at_once) == [b"2", b"2"]
    assert await asyncio.gather(*paced) == [b"1", b"3", b"4"]
    assert renderer.made == [SUMS, AT_ONCE, TENANTS, SUMS]


async def test_some_are_rendered_in_a_pause_of_others_and_do_not_extend_it(renderer: Renderer) -> None:
    renderer.takes_s = 0.5
    await renderer.scrapes.body(SUMS)
    renderer.pausing, renderer.resume = asyncio.Event(), asyncio.Event()
    paced = [asyncio.create_task(renderer.scrapes.body(one)) for one in (SUMS, TENANTS)]
    await renderer.pausing.wait()
    assert [await renderer.scrapes.body(AT_ONCE) for _ in range(2)] == [b"2", b"3"]
    renderer.resume.set()
    assert await asyncio.gather(*paced) == [b"4", b"5"]
    await renderer.scrapes.body(AT_ONCE)
    renderer.now += MAX_PAUSE_S
    await renderer.scrapes.body(SUMS)
    assert renderer.pauses == [0.0, MAX_PAUSE_S, MAX_PAUSE_S, 0.0]


async def test_a_client_that_leaves_takes_no_body_from_others(renderer: Renderer) -> None:
    renderer.go.clear()
    renderer.begun = asyncio.Event()
    left, waits = (asyncio.create_task(renderer.scrapes.body(SUMS)) for _ in range(2))
    await renderer.begun.wait()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    renderer.go.set()
    assert await waits == b"1"


async def test_an_error_is_of_those_who_wait_for_that_body_alone(renderer: Renderer) -> None:
    renderer.fails = True
    with pytest.raises(ValueError, match="no text"):
        await renderer.scrapes.body(SUMS)
    renderer.fails = False
    assert await renderer.scrapes.body(SUMS) == b"2"
