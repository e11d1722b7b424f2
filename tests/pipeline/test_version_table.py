"""The table of model versions and its followers: an unreadable table changes nothing."""

from __future__ import annotations

import os
import select
from pathlib import Path

import msgspec
import pytest

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.models import versions
from pipeline.runtime import process


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config(server=ServerConfig(run_dir=str(tmp_path / "run")), models=(ModelConfig(name="m", path="m.gguf"),))
    paths.run_dir(config).mkdir(parents=True)
    return config


def second(config: Config) -> versions.VersionTable:
    """Another version of the model serves."""
    known = versions.initial(config)
    return msgspec.structs.replace(known, versions=(msgspec.structs.replace(known.versions[0], serial=1),))


def test_without_a_table_the_configured_models_are_used(config: Config) -> None:
    assert versions.read(config) == versions.initial(config)
    follower = versions.VersionFollower(config)
    versions.write(config, second(config))
    assert follower.poll() and follower.table == second(config)
    versions.table_path(config).unlink()
    assert follower.poll() and follower.table == versions.initial(config)


def test_a_change_of_the_table_wakes_who_watches_its_bell(config: Config) -> None:
    versions.write(config, second(config))
    assert not versions.bell_path(config).exists(), "only a watch makes it"
    fd = process.open_touch_watch(versions.bell_path(config))
    try:
        assert not select.select([fd], [], [], 0)[0]
        versions.write(config, versions.initial(config))
        assert select.select([fd], [], [], 0)[0], "the event is there when the call returns"
    finally:
        os.close(fd)


@pytest.mark.parametrize("damage", [b"{", b"\xff", b'{"configured": "\xff"}', b"[" * 100_000])
def test_a_damaged_table_means_the_configured_models(config: Config, damage: bytes) -> None:
    follower = versions.VersionFollower(config)
    versions.table_path(config).write_bytes(damage)
    follower.poll()
    assert follower.table == versions.read(config) == versions.initial(config)


def test_a_damaged_reason_of_a_worker_group_is_none(config: Config) -> None:
    run_dir = paths.run_dir(config)
    versions.failure_path(run_dir, "worker-m").write_bytes(b'{"code": "\xff"}')
    assert versions.read_failure(run_dir, "worker-m") is None


def test_an_unreadable_table_changes_nothing(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    versions.write(config, second(config))
    follower = versions.VersionFollower(config)
    path = versions.table_path(config)
    path.unlink()
    path.mkdir()  # of whatever user: it cannot be read
    assert [follower.poll() for _ in range(3)] == [False] * 3
    assert follower.table == second(config)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with pytest.raises(OSError, match=path.name):
        versions.read(config)
    path.rmdir()
    third = msgspec.structs.replace(second(config), versions=())
    versions.write(config, third)
    assert follower.poll() and follower.table == third
