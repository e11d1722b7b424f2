"""A load or reload says that the server keeps its number of worker groups, where the configuration has another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import resolve
from pipeline.models import versions
from stages.gateway.service import Service
from stages.gateway.versions.catalog import VersionCatalog
from starling.cli.reload import kept_groups
from tests.stored_cores import stored_by_a_server


def configured(home: Path, groups: int | str) -> Any:
    server = {"run_dir": str(home)}
    return resolve(
        {"models": [{"name": "m", "path": "/m.gguf"}], "server": server, "performance": {"worker_groups": groups}}, {}
    )


def reloaded(home: Path, groups: int | str) -> dict[str, Any]:
    """What a gateway with that configuration answers, whose version of the model counts as the new one."""
    config = configured(home, groups)
    catalog = VersionCatalog(config, versions.read(config), lambda fresh: versions.write(config, fresh))
    loader = Service(config, lambda frame: True, lambda frame: True, catalog=catalog).loader
    return {"instances": loader.state(), "change": {"model": "m", "instance": "m"}}


@pytest.mark.parametrize(("running", "now"), [(1, 2), (2, 1)])
async def test_another_number_is_named_with_the_way_to_it(tmp_path: Path, running: int, now: int) -> None:
    home = tmp_path / "run"
    home.mkdir(mode=0o700)
    with stored_by_a_server(home, [0, 1]):
        state = reloaded(home, running)
        assert [one["worker_groups"] for one in state["instances"]] == [running]
        note = kept_groups(configured(home, now), state)
        assert f"worker_groups = {now}" in note and "starling down" in note
        assert kept_groups(configured(home, running), state) == ""


async def test_a_gateway_that_does_not_report_the_number_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir(mode=0o700)
    state = reloaded(home, 1)
    del state["instances"][0]["worker_groups"]
    assert kept_groups(configured(home, 2), state) == ""
