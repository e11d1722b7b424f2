"""What the relay does with the answers of engines that promise no equal bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.api import sse
from pipeline.api.output_text import FIXED, TEXT, comment
from pipeline.errors import NotFound
from pipeline.fleet.bodies import LoadedModel
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.forward import Bounds, Forward, Refusal
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.upstream import Answer, Take, Unreachable
from tests.orchestrator.agents import engine, heartbeat, request, router, view
from tests.orchestrator.received import Received

BEGUN = comment(1) + sse.event(b'{"choices":[{"index":0,"text":"a","finish_reason":null}]}')
ENDED = comment(2) + sse.event(b'{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}') + sse.DONE
DEAD = (503, b'{"error":{"code":"MODEL_UNAVAILABLE","message":"has stopped answering"}}')
BAD = (400, b'{"error":{"code":"INVALID_REQUEST","message":"Last-Event-ID is not possible"}}')


class Scripted:
    """An answer whose bytes are known."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.headers = headers or {}
        self._parts = [body]

    async def read(self) -> bytes:
        return self._parts.pop() if self._parts else b""

    async def pass_to(self, take: Take) -> bool:
        while data := await self.read():
            if not take(data):
                return True
        return False

    def abort(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Engines:
    """They answer one attempt after the other. `None`: nothing listens there."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.sent: list[Mapping[str, str]] = []

    async def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_s: float = 0.0,
        *,
        agent_id: str,
        begins: object = None,
    ) -> Answer:
        if method == "DELETE":  # a request that was left there
            return Scripted(404, b"")
        self.sent.append(dict(headers))
        answer = self._answers.pop(0)
        if answer is None:
            raise Unreachable("connection refused")
        return Scripted(*answer)


class Dying(Engines):
    """Each dies when the client has all of its answer."""

    async def open(self, *given: Any, **more: Any) -> Answer:
        answer = await super().open(*given, **more)
        read = answer.read

        async def read_until_lost() -> bytes:
            if data := await read():
                return data
            raise Unreachable("connection reset")

        answer.read = read_until_lost  # type: ignore[method-assign]
        return answer


class Clock:
    """It advances while the relay waits."""

    now = 0.0

    async def wait(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def relay_of(engines: Engines, *models: LoadedModel) -> Relay:
    """Agents a, b, ... with one model each."""

    async def poll(record: object) -> Any:
        return heartbeat("a")

    async def load(*wanted: str) -> None:
        raise NotImplementedError

    clock = Clock()
    views = [view(name, model) for name, model in zip("ab", models)]
    return Relay(
        engines,
        router(*views),
        Registry(poll, lambda: clock.now),
        ColdLoads(load, 1, lambda: clock.now),
        Bounds(1.0, 1000.0),
        lambda: clock.now,
        clock.wait,
    )


def forward(**fields: Any) -> Forward:
    return Forward(routed=request(), path="/v1/completions", body=b"{}", headers={}, **fields)


def other(**fields: Any) -> LoadedModel:
    return engine(engine="vllm", continues_text=True, engine_url="http://e", **fields)


@pytest.mark.parametrize("is_other", [False, True])
async def test_what_was_delivered_is_charged_when_the_client_leaves(is_other: bool) -> None:
    class Leaving(Received):
        async def write(self, data: bytes) -> None:
            raise ConnectionResetError("the client has disconnected")

        def write_now(self, data: bytes) -> bool:
            return False

    one, charged = other() if is_other else engine(engine_url="http://e"), list[int]()
    relay = relay_of(Engines((200, BEGUN)), one)
    with pytest.raises(ConnectionResetError):
        await relay.stream(forward(is_stream=True), Leaving(), charged.append)
    assert len(charged) == 1 and (charged[0] or is_other)
    await relay.close()


async def test_only_engines_that_accept_a_text_count_as_replays() -> None:
    engines = Engines((200, BEGUN), None, DEAD, None, DEAD, None, DEAD, None, (200, ENDED))
    relay, out = relay_of(engines, other(), other()), Received()
    assert await relay.stream(forward(is_stream=True), out) == 2
    assert out.data.endswith(sse.DONE) and b"error" not in out.data
    assert json.loads(out.data.split(b"\n\n")[-3].partition(b"data: ")[2])["starling_replayed"] == 1
    assert relay.replayed_texts == 1 and [TEXT in one for one in engines.sent] == [False] + 8 * [True]
    await relay.close()


CALL = (
    b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"x"}}]},"finish_reason":null}]}'
)
CALL_BEGUN, OF_CALL = comment(3) + sse.event(CALL), {TEXT: FIXED}


async def test_a_stream_that_is_more_than_its_text_ends_with_its_engine() -> None:
    failed = sse.event(b'{"error":{"code":"MODEL_UNAVAILABLE","message":"has stopped answering"}}')
    for lost in (CALL_BEGUN, CALL_BEGUN + failed, CALL_BEGUN + b"data: nonsense\n\n"):
        # Before anything was delivered the request is sent again.
        engines = Engines((200, b"", OF_CALL), DEAD, (200, lost, OF_CALL), (200, ENDED))
        relay, out, charged = relay_of(engines, other(), other()), Received(), list[int]()
        assert await relay.stream(forward(is_stream=True), out, charged.append) == 3
        assert len(engines.sent) == 3 and not any(TEXT in one for one in engines.sent)
        assert out.data.startswith(sse.event(CALL)) and b"starling_replayed" not in out.data
        error = json.loads(out.data.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == "MODEL_UNAVAILABLE" and "same answer; send the request again" in error["message"]
        assert relay.replayed_texts == 0 and charged == [3]
        await relay.close()


@pytest.mark.parametrize("is_other", [False, True])
async def test_an_engine_that_dies_after_its_last_event_is_not_missed(is_other: bool) -> None:
    engines = Dying((200, BEGUN + ENDED))
    one = other() if is_other else engine(engine_url="http://e")
    relay, out = relay_of(engines, one, one), Received()
    await relay.stream(forward(is_stream=True), out)
    assert out.data.endswith(sse.DONE) and out.data.count(sse.DONE) == 1
    assert len(engines.sent) == 1 and relay.moves["lost"] == 0
    await relay.close()


async def test_an_engine_that_dies_behind_its_door_is_waited_for_as_for_one_that_died() -> None:
    engines = Engines(*(100 * [DEAD]), (200, b"answer"))  # 100 attempts take longer than for a request never taken
    relay = relay_of(engines, other())
    assert (await relay.whole(forward()))[2] == b"answer"


async def test_the_door_is_told_that_a_stream_is_to_go_on_after_an_event() -> None:
    engines = Engines(BAD)
    with pytest.raises(Refusal, match="400"):
        await relay_of(engines, other()).stream(forward(is_stream=True, last_id="req-1:7"), Received())
    assert engines.sent[0]["Last-Event-ID"] == "req-1:7"


async def test_what_gives_no_answer_twice_is_not_read_again() -> None:
    engines = Engines((200, BEGUN + ENDED), (200, b"answer"), None, (200, b"answer"))
    relay = relay_of(engines, other(), other())
    await relay.stream(forward(is_stream=True), Received())
    await relay.whole(forward())
    assert relay.kept.find("req-1") is None and relay.kept.nbytes == 0
    # One that an engine of this project has got first moves to another engine.
    relay = relay_of(engines, engine(engine_url="http://e"), other())
    relay.kept.put(forward(), "a", engine())
    await relay.whole(forward())
    assert relay.kept.find("req-1") is None and relay.kept.nbytes == 0
    with pytest.raises(NotFound, match="vllm computes the model"):
        await relay_of(engines, other()).whole(forward(was_sent=True))
