"""Agents that are silent lose their requests to others; not so if it was the orchestrator that did not listen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stages.orchestrator import stage
from stages.orchestrator.interfaces import NodeHealth
from stages.orchestrator.stage import OrchestratorStage

POLL_S, SILENT_S = 0.5, 3.0


async def lost_at(monkeypatch: pytest.MonkeyPatch, stopped_s: float, answers_again_at: float) -> list[float]:
    """When the agent's requests are lost, s. Its last answer came at 0, and the polls after that have failed.

    The orchestrator is stopped at 0.5 for `stopped_s`, and looks at its agents until 20.
    """
    now, lost = 0.0, list[float]()

    def health() -> list[NodeHealth]:
        is_ready = now >= answers_again_at
        return [NodeHealth("a", "READY" if is_ready else "SUSPECT", "", 0.0 if is_ready else now)]

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + (stopped_s if now == POLL_S else 0.0)
        if now > 20.0:
            raise asyncio.CancelledError

    orchestrator = {"poll_ms": 1000 * POLL_S, "silent_ms": 1000 * SILENT_S}
    one: Any = SimpleNamespace(
        config=SimpleNamespace(fleet=SimpleNamespace(orchestrator=SimpleNamespace(**orchestrator))),
        registry=SimpleNamespace(health=health),
        relay=SimpleNamespace(kept=SimpleNamespace(expire=lambda: None)),
        follower=SimpleNamespace(settle=lambda: None),
        _tls=None,
        _lose_work=lambda agent_id, reason: lost.append(now),
        _start_poll=lambda agent_id: None,
        _move_draining=lambda agent_id: None,
    )
    monkeypatch.setattr(stage, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(stage, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        await OrchestratorStage._poll(one)
    return lost


async def test_a_silent_agent_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await lost_at(monkeypatch, 0.0, 1e9))[0] == SILENT_S + POLL_S


async def test_no_agent_is_lost_because_its_orchestrator_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await lost_at(monkeypatch, 10.0, 11.5) == []


async def test_an_agent_that_stays_silent_after_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await lost_at(monkeypatch, 10.0, 1e9))[0] == 0.5 + POLL_S + 10.0 + SILENT_S + POLL_S
