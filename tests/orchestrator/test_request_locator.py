"""What an orchestrator asks engines about a request while one of them is frozen, or its agent is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from stages.orchestrator.request_locator import LOCATE_S, Found, RequestLocator
from stages.orchestrator.upstream import Answer, Begins, Take, Unreachable
from tests.orchestrator.agents import MODEL, engine, router, view
from tests.orchestrator.loopback_engine import WAIT_S, LoopbackEngine, head, keyed, relaying, response

SILENT_S = 3.0


class Response:
    """An engine's answer. Its body comes when the test says so."""

    def __init__(self, status: int, body: bytes = b"") -> None:
        self.status = status
        self.headers: Mapping[str, str] = {"Content-Type": "text/event-stream"}
        self.is_closed = False
        self.body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if status != 200 or body:
            self.body.set_result(body)

    async def read(self) -> bytes:
        part, self.body = await self.body, asyncio.get_running_loop().create_future()
        self.body.set_result(b"")
        return part

    async def pass_to(self, take: Take) -> bool:
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        self.body.set_exception(Unreachable(reason))

    def close(self) -> None:
        self.is_closed = True


class Engines:
    """A `Client` of engines that answer when the test says so."""

    def __init__(self, *names: str) -> None:
        loop = asyncio.get_running_loop()
        self.answers: dict[str, asyncio.Future[Response]] = {name: loop.create_future() for name in names}
        self.asked: list[str] = []
        self.given_up: list[str] = []

    async def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_s: float = 0.0,
        *,
        agent_id: str,
        begins: Begins | None = None,
    ) -> Answer:
        self.asked.append(agent_id)
        try:
            return await asyncio.shield(self.answers[agent_id])
        except asyncio.CancelledError:
            self.given_up.append(agent_id)
            raise

    def answer(self, name: str, status: int, body: bytes = b"") -> Response:
        made = Response(status, body)
        self.answers[name].set_result(made)
        return made

    def locator(self, suspect: str = "") -> RequestLocator:
        views = [
            view(name, engine(engine_url=f"http://{name}"), health="SUSPECT" if name == suspect else "READY")
            for name in self.answers
        ]
        return RequestLocator(router(*views), self, SILENT_S)


async def result_of(asked: asyncio.Task[Any]) -> Any:
    async with asyncio.timeout(LOCATE_S * 0.9):  # what waits for a frozen engine has this bound, or none
        return await asked


async def begin(engines: Engines, asking: Any) -> asyncio.Task[Any]:
    """Ask, and return when all engines have been asked."""
    task = asyncio.ensure_future(asking)
    while len(engines.asked) < len(engines.answers):
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("what", ["locate", "locate_other", "find", "response", "end"])
async def test_the_first_positive_answer_counts(what: str) -> None:
    """Of two engines the second one answers, and the first one is frozen."""
    engines = Engines("a", "b")
    locator = engines.locator()
    task = await begin(
        engines,
        {
            "locate": lambda: locator.locate("req-1", MODEL, "1", is_certain=True),
            "locate_other": lambda: locator.locate_other(keyed(), {"c"}),
            "find": lambda: locator.find("req-1", "1"),
            "response": lambda: locator.response("/v1/responses/resp-1", "1"),
            "end": lambda: locator.end("req-1", "1"),
        }[what](),
    )
    engines.answer("b", 200, b"{}")
    assert await result_of(task) == {
        "find": Found("b", MODEL, "text/event-stream"),
        "response": b"{}",
        "end": True,
    }.get(what, "b")
    assert engines.given_up == ([] if what == "end" else ["a"])  # a cancellation is for all that have the request
    await locator.close()
    assert engines.given_up == ["a"] and not locator._asked


async def test_a_negative_answer_does_not_count_before_a_positive_one() -> None:
    engines = Engines("a", "b")
    task = await begin(engines, engines.locator().find("req-1", "1"))
    engines.answer("a", 404)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    engines.answer("b", 200)
    assert (await result_of(task)).agent_id == "b"


async def test_of_two_that_have_it_all_ask_for_the_same_one() -> None:
    """Both have answered: the order of the table decides."""
    engines = Engines("a", "b")
    task = await begin(engines, engines.locator().find("req-1", "1"))
    for name in "ba":
        engines.answer(name, 200)
    assert (await result_of(task)).agent_id == "a"


@pytest.mark.parametrize("what", ["find", "response", "end"])
async def test_a_lost_agent_is_not_waited_for(what: str) -> None:
    engines = Engines("a", "b")
    locator = engines.locator()
    ask = {"response": locator.response, "find": locator.find, "end": locator.end}[what]
    task = await begin(engines, ask("/v1/responses/resp-1", "1"))
    engines.answer("b", 404)
    for _ in range(10):
        await asyncio.sleep(0)
    locator.lose_agent("b", "it is lost, too")
    assert not task.done()
    locator.lose_agent("a", "the agent has not answered for 3.0 s")
    assert not await result_of(task)
    assert engines.given_up == ["a"] and not locator._asked


async def test_an_answer_that_stops_in_its_body_ends_with_its_agent() -> None:
    engines = Engines("a")
    locator = engines.locator()
    task = await begin(engines, locator.response("/v1/responses/resp-1", "1"))
    answer = engines.answer("a", 200)
    for _ in range(10):
        await asyncio.sleep(0)
    locator.lose_agent("a", "the agent has not answered for 3.0 s")
    assert await result_of(task) is None
    assert answer.is_closed and not locator._asked


async def test_a_suspect_agent_has_the_time_after_which_it_is_lost() -> None:
    engines = Engines("a", "b")
    locator = engines.locator(suspect="a")
    assert [(one.agent_id, one.bound_s) for one in locator._engines()] == [("a", SILENT_S), ("b", LOCATE_S)]
    assert [one.agent_id for one in locator._ready(MODEL)] == ["b"]


async def test_the_relay_ends_the_look_ups_of_an_agent_that_it_loses() -> None:
    """Two engines, of which the first one sends no head, and then an answer without its body."""
    silent, other = LoopbackEngine(b"", head(200)), LoopbackEngine(response(404), response(404))
    async with relaying(silent, other) as world:
        locator = world.relay.locator
        for number, ask in enumerate((locator.find, locator.response), 1):
            task = asyncio.ensure_future(ask("req-1", "1") if number == 1 else ask("/v1/responses/resp-1", "1"))
            async with asyncio.timeout(WAIT_S):
                while len(silent.requests) < number or world.client.n_answers < 2 * number - 1:
                    await asyncio.sleep(0)
            assert world.relay.lose_agent("a", "the agent has not answered for 3.0 s") == 0  # requests that it serves
            assert await result_of(task) is None
