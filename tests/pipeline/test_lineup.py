"""The record of loaded models as its readers see it: what cannot be read is not taken for what is configured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.models import versions


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config(server=ServerConfig(run_dir=str(tmp_path / "run")), models=(ModelConfig(name="m", path="m.gguf"),))
    paths.run_dir(config).mkdir(parents=True)
    return config


def second(config: Config) -> versions.Lineup:
    """Another version of the model serves."""
    known = versions.initial(config)
    return msgspec.structs.replace(known, instances=(msgspec.structs.replace(known.instances[0], serial=1),))


def test_without_a_record_there_is_what_is_configured(config: Config) -> None:
    assert versions.read(config) == versions.initial(config)
    follower = versions.Follower(config)
    versions.write(config, second(config))
    assert follower.look() and follower.lineup == second(config)
    versions.record_path(config).unlink()
    assert follower.look() and follower.lineup == versions.initial(config)


def test_a_record_that_cannot_be_read_changes_nothing(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    versions.write(config, second(config))
    follower = versions.Follower(config)
    path = versions.record_path(config)
    path.unlink()
    path.mkdir()  # of whatever user: it cannot be read
    assert [follower.look() for _ in range(3)] == [False] * 3
    assert follower.lineup == second(config)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with pytest.raises(OSError, match=path.name):
        versions.read(config)
    path.rmdir()
    third = msgspec.structs.replace(second(config), instances=())
    versions.write(config, third)
    assert follower.look() and follower.lineup == third
