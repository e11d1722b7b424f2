"""The capacity check says what leaves too little memory: the machine, or its control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import cgroup, procfs
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ResourceError
from pipeline.models import capacity

MB = 1 << 20


@pytest.mark.parametrize(
    ("group", "available", "owner"),
    [
        (cgroup.Limits(None, 100 * MB, 10 * MB), 5000 * MB, r"the control group \(limit: 104,857,600 bytes\)"),
        (cgroup.Limits(None, 9000 * MB, 8000 * MB), 10 * MB, "the machine"),
        (cgroup.Limits(None, None, None), 10 * MB, "the machine"),
    ],
)
def test_a_refusal_names_what_is_short(
    group: cgroup.Limits, available: int, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setattr(cgroup, "read", lambda: group)
    monkeypatch.setattr(procfs, "available_memory", lambda: available)
    config = Config()
    free = capacity.measure(config)
    assert free.memory == 10 * MB
    wanted = capacity.MemoryPlan(weights=11 * MB, kv=0, steps_and_activations=0)
    with pytest.raises(ResourceError, match=f"and {owner} has 10,485,760 bytes available"):
        capacity.check_plan(config, "m", wanted, free, 0)
    with pytest.raises(ResourceError, match=f"and {owner} has 10,485,760 free"):
        capacity.check(config, ModelConfig(name="m", kv_cache_mb=20), free)
