"""Fixtures of the tests of edges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.endpoint_pair import Pair


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home for each test: two servers, here tests at the same time, cannot share one."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))


@pytest.fixture
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault plan that a test is given by `indirect`."""
    monkeypatch.setenv("STARLING_FAULTS", request.param)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()
