"""The processes that check API keys use a clock that no change of the system's moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from pipeline.config.load import resolve
from pipeline.runtime.steady_clock import SteadyClock
from stages.gateway.stage import GatewayStage
from stages.orchestrator.stage import OrchestratorStage


class Opened(Exception):
    """The key file was opened with a clock."""


def test_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[Any] = []

    def opened(path: Path, *given: Any) -> None:
        clocks.extend(given)
        raise Opened

    monkeypatch.setattr("stages.gateway.stage.AsyncioLoop", MagicMock())
    monkeypatch.setattr("stages.gateway.stage.KeyFile", opened)
    with pytest.raises(Opened):
        GatewayStage(resolve({}, {"STARLING_HOME": str(tmp_path)}))
    (clock,) = clocks
    assert isinstance(clock.__self__, SteadyClock)


async def test_an_orchestrator(tmp_path: Path) -> None:
    stage = OrchestratorStage(resolve({}, {"STARLING_HOME": str(tmp_path)}))
    try:
        file = stage.front.keys._file
        assert file is not None and isinstance(file._clock.__self__, SteadyClock)  # type: ignore[attr-defined]
    finally:
        await stage.client.close()
        await stage._store.close()
        await stage._blobs.close()
        await stage.responses.close_store()
