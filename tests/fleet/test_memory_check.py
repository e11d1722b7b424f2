"""An agent loads no model, and no adapter, for which its host has no memory: adapters count, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline import cgroup, procfs
from pipeline.config.load import resolve
from pipeline.config.schema import AdapterConfig, ModelConfig
from pipeline.errors import ModelUnavailable, ResourceError
from stages.agent.engines.interface import AdapterFile
from stages.agent.memory_check import check_adapter_memory, check_memory
from stages.agent.models import Models
from stages.agent.state_file import Stored
from tests.fleet.test_engines import ENTRY

ADAPTER = 300 << 20  # bytes
CONFIG = resolve({}, {})
MODEL = ModelConfig(name="m", kv_cache_mb=100)


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group of the tests does not matter."""
    monkeypatch.setattr(cgroup, "read", lambda: cgroup.Limits(None, None, None))


def published(*sizes: int) -> tuple[AdapterFile, ...]:
    return tuple(AdapterFile(f"a{n}", f"{n}" * 64, Path(f"/{n}"), size) for n, size in enumerate(sizes))


def test_published_adapters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = CONFIG.kv_cache_bytes(MODEL)
    monkeypatch.setattr(procfs, "total_memory", lambda: 2 * kv + ADAPTER)
    monkeypatch.setattr(procfs, "available_memory", lambda: kv + ADAPTER)
    check_memory(CONFIG, ENTRY, MODEL, published(ADAPTER))
    with pytest.raises(ResourceError, match=f"{ADAPTER + 1:,} of adapters.*unload a model"):
        check_memory(CONFIG, ENTRY, MODEL, published(ADAPTER, 1))
    with pytest.raises(ModelUnavailable, match="in all: lower kv_cache_mb, or use smaller adapters"):
        check_memory(CONFIG, ENTRY, MODEL, published(ADAPTER, kv + 1))


def test_each_worker_group_has_weights_and_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    config = resolve({"performance": {"worker_groups": 2, "use_mmap": False}}, {})
    needed = config.kv_cache_bytes(MODEL) + 2 * (ENTRY.weights_bytes + ADAPTER)
    monkeypatch.setattr(procfs, "total_memory", lambda: 2 * needed)
    monkeypatch.setattr(procfs, "available_memory", lambda: needed)
    check_memory(config, ENTRY, MODEL, published(ADAPTER))
    monkeypatch.setattr(procfs, "available_memory", lambda: needed - 1)
    with pytest.raises(ResourceError, match=f"needs {needed:,} bytes of memory .*{2 * ADAPTER:,} of adapters"):
        check_memory(config, ENTRY, MODEL, published(ADAPTER))
    monkeypatch.setattr(procfs, "available_memory", lambda: 2 * ADAPTER - 1)
    with pytest.raises(ResourceError, match=f"'m:a' needs {2 * ADAPTER:,} bytes"):
        check_adapter_memory(config, MODEL, "m:a", ADAPTER)


def test_configured_adapters_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kv, file = CONFIG.kv_cache_bytes(MODEL), tmp_path / "own.gguf"
    file.write_bytes(bytes(1000))
    monkeypatch.setattr(procfs, "total_memory", lambda: 4 * kv)
    monkeypatch.setattr(procfs, "available_memory", lambda: kv + 999)
    check_memory(CONFIG, ENTRY, MODEL)
    own = ModelConfig(name="m", kv_cache_mb=100, adapters=(AdapterConfig(name="own", path=str(file)),))
    with pytest.raises(ResourceError, match="1,000 of adapters"):
        check_memory(CONFIG, ENTRY, own)


async def test_the_agent_counts_the_adapters_that_a_model_starts_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    none: None = None
    stored = Stored(agent_id="a", incarnation="b")
    models = Models(CONFIG, tmp_path, tmp_path / "models", stored, [], none, none, lambda: True)  # type: ignore[arg-type]
    kv = CONFIG.kv_cache_bytes(models.settings(ENTRY.name))
    monkeypatch.setattr(procfs, "total_memory", lambda: 4 * kv)
    monkeypatch.setattr(procfs, "available_memory", lambda: kv)
    await models.make_memory(ENTRY)
    with pytest.raises(ResourceError, match=f"{ADAPTER:,} of adapters"):
        await models.make_memory(ENTRY, published(ADAPTER))


def test_an_adapter_of_an_engine_that_runs_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "available_memory", lambda: ADAPTER)
    check_adapter_memory(CONFIG, MODEL, "m:a", ADAPTER)
    with pytest.raises(ResourceError, match=f"'m:a' needs {ADAPTER + 1:,} bytes of memory") as refused:
        check_adapter_memory(CONFIG, MODEL, "m:a", ADAPTER + 1)
    assert refused.value.param == "model_id", "an orchestrator unloads an idle model for it"


def test_the_control_group_of_the_agent_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = CONFIG.kv_cache_bytes(MODEL)
    monkeypatch.setattr(procfs, "total_memory", lambda: 100 * kv)
    monkeypatch.setattr(procfs, "available_memory", lambda: 100 * kv)
    monkeypatch.setattr(cgroup, "read", lambda: cgroup.Limits(None, 2 * kv, kv))
    check_memory(CONFIG, ENTRY, MODEL)
    monkeypatch.setattr(cgroup, "read", lambda: cgroup.Limits(None, 2 * kv, kv - 1))
    with pytest.raises(ResourceError, match=f"the agent's control group has {kv - 1:,}: unload a model"):
        check_memory(CONFIG, ENTRY, MODEL)
    with pytest.raises(ResourceError, match=f"the agent's control group has {kv - 1:,}: unload a model"):
        check_adapter_memory(CONFIG, MODEL, "m:a", kv)
    monkeypatch.setattr(cgroup, "read", lambda: cgroup.Limits(None, kv - 1, kv - 1))
    with pytest.raises(ModelUnavailable, match=f"the agent's control group has {kv - 1:,} in all"):
        check_memory(CONFIG, ENTRY, MODEL)
