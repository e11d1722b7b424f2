"""The number of connections is bounded by what the process may open."""

from __future__ import annotations

import logging

import pytest

from pipeline.config.load import resolve
from stages.gateway.http.connection_gate import OTHER_FILES, SPARE, ConnectionGate


@pytest.mark.parametrize(("max_files", "bound"), [(1_000_000, 100 + SPARE), (OTHER_FILES + 40, 40), (16, 1)])
def test_few_files_bound_the_connections(max_files: int, bound: int, caplog: pytest.LogCaptureFixture) -> None:
    config = resolve({"server": {"max_concurrent_requests": 100, "max_connections_per_address": 1000}}, {})
    with caplog.at_level(logging.WARNING):
        gate = ConnectionGate(config, max_files, lambda: None)
    taken = 0
    while gate._bounds.refusal("192.0.2.1") is None:
        gate._bounds.take("192.0.2.1")
        taken += 1
    assert taken == bound
    assert ("limit of open files" in caplog.text) == (bound != 100 + SPARE)
