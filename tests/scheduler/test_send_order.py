"""Tokens go to the gateway before the next step is composed, unless the worker waits for that step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from pipeline.config.load import resolve
from pipeline.ipc.endpoint import Hub
from pipeline.protocol.messages import Commit, Frame, Tokens
from stages.scheduler.stage import SchedulerStage

from .peers import submission
from .world import World

MODEL = {"name": "m", "path": "/model.gguf"}


@pytest.fixture
def stage() -> Iterator[SchedulerStage]:
    with tempfile.TemporaryDirectory() as folder:  # the paths of sockets are short
        server = {name: f"{folder}/{name}" for name in ("run_dir", "arena_dir", "state_dir")}
        stage = SchedulerStage(resolve({"models": [MODEL], "server": server}, {}))
        yield stage
        stage.loop.quit(0)
        stage.run()


@pytest.mark.parametrize("computed", [1, 2])
def test_tokens_are_sent_before_the_next_step_is_composed(
    stage: SchedulerStage, monkeypatch: pytest.MonkeyPatch, computed: int
) -> None:
    """`computed`: how many of two published steps; after both the worker waits, and the next step goes first."""
    world = World()
    world.set_cost(4_000.0, 1.0, 0.001)
    world.submit(submission("a", [1, 2, 3], 20))
    world.run_round()
    world.exchange_with_kv()
    assert world.run_round() == 2
    (runner,) = stage.runners.values()
    (group,) = runner.groups
    own = runner.engine, group.engine_group
    runner.engine, (group.engine_group,) = world.engine, world.engine.groups
    ring = world.engine.worker.ring
    assert ring is not None
    heads: list[int] = []  # number of the last published step, when tokens are sent

    def send(_gateway: bytes, frame: Frame) -> None:
        assert isinstance(frame, Tokens)
        heads.append(ring.head)

    monkeypatch.setattr(stage, "_send_gateway", send)
    to_kv: list[Frame] = []
    monkeypatch.setattr(stage.kv, "send", to_kv.append)
    for _ in range(computed):
        world.compute_step()
    head = ring.head
    world.engine.leases.frames.append(Commit("m", "another", 16))
    stage._rounds.run(world.now)
    assert ring.head > head, "the next step is published"
    assert heads == ([head] if computed == 1 else [])
    assert not to_kv, "kv is woken once, at the end of the round"
    stage._send_output(runner)
    assert len(heads) == 1
    assert to_kv
    runner.engine, group.engine_group = own


def test_the_next_tick_comes_soon_when_a_gateway_does_not_read(
    stage: SchedulerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticks send what it had no room for, and in steady work they come every quarter of a second."""
    monkeypatch.setattr(stage.gateways, "send", lambda gateway, frame: False)
    monkeypatch.setattr(Hub, "peers", property(lambda self: {b"g": None}))
    stage.loop.is_steady, stage.loop._next_tick = True, stage.loop.clock() + 60.0
    stage._send_gateway(b"g", Commit("m", "any", 16))
    assert stage.loop._next_tick <= stage.loop.clock() + 0.1


def test_frames_that_kv_does_not_read_are_sent_later_in_order(
    stage: SchedulerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for pages that was lost would be waited for until the sequence's time is over."""
    sent: list[Frame] = []
    room = 1

    def send(frame: Frame) -> bool:
        if len(sent) < room:
            sent.append(frame)
            return True
        return False

    monkeypatch.setattr(stage.kv, "send", send)
    (runner,) = stage.runners.values()
    frames: list[Frame] = [Commit("m", name, 16) for name in "abc"]
    runner.engine.leases.frames += frames
    stage._send_output(runner)
    assert sent == frames[:1]
    room = 3
    stage._send_output(runner)
    assert sent == frames
    assert not runner.engine.leases.frames
