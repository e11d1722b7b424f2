"""Ticks of the gateway may be rare only while no request waits for one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config.load import resolve
from pipeline.protocol.messages import Describe, Frame
from stages.gateway.service import Service


async def test_a_gateway_is_steady_unless_something_waits_for_a_tick(tmp_path: Path) -> None:
    server = {name: str(tmp_path / name) for name in ("run_dir", "arena_dir", "state_dir")}
    (tmp_path / "m.gguf").touch()
    models = [{"name": name, "path": str(tmp_path / "m.gguf")} for name in ("m", "other")]
    config = resolve({"models": models, "server": server}, {})
    accepts = False  # the tokenizer's queue
    sent: list[Frame] = []

    def send(frame: Frame) -> bool:
        if accepts:
            sent.append(frame)
        return accepts

    service = Service(config, lambda frame: True, send, clock=lambda: 5.0)
    assert service.is_steady
    call = asyncio.create_task(service.tokenizer.request(lambda key: Describe(key, "m@1", ())))
    await asyncio.sleep(0)  # it begins
    assert not service.is_steady, "a frame could not be sent"
    accepts = True
    service.tokenizer.tick()
    assert [type(frame) for frame in sent] == [Describe]
    assert service.is_steady
    service.readiness.drains.begin("m", 3.0)
    assert not service.is_steady, "the drain ends at a tick"
    service.readiness.drains.lift("m")
    assert service.is_steady
    service.catalog.begin(config.models[0], "change", "demand", 1e10)
    assert not service.is_steady, "a version is being loaded"
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
