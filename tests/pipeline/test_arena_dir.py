"""The arena directory cannot be taken by another user: a directory or a link of another user is not used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime import arena_dir, run_dir

OTHER = 65534  # a user id

PREPARE = """
from pipeline.config.load import load
from pipeline.runtime import arena_dir
print(arena_dir.prepare(load()))
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Arenas in a directory that stands for /dev/shm."""
    (tmp_path / "shm").mkdir()
    run_dir.prepare(tmp_path / "run")
    server = {"run_dir": str(tmp_path / "run"), "arena_dir": str(tmp_path / "shm")}
    return resolve({"server": server}, {})


def take(path: Path) -> None:
    """Another user creates the directory."""
    if os.getuid():
        pytest.skip("only root can create the directory of another user")
    path.mkdir(mode=0o700)
    os.chown(path, OTHER, OTHER)


def test_it_is_private_and_the_same_at_every_start(config: Config) -> None:
    made = arena_dir.prepare(config)
    assert made == paths.arena_dir(config) == arena_dir.prepare(config)
    assert made.stat().st_mode & 0o777 == 0o700
    made.rmdir()
    assert arena_dir.prepare(config) == made


def test_if_it_is_taken_all_processes_use_another_one(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = paths.arena_dir(config)
    take(taken)
    environment = {
        **os.environ,
        "STARLING_HOME": str(tmp_path),
        "STARLING_SERVER__ARENA_DIR": config.server.arena_dir,
    }
    command = [sys.executable, "-c", PREPARE]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    made = {process.communicate()[0].splitlines()[-1] for process in started}
    with caplog.at_level(logging.WARNING):
        chosen = arena_dir.prepare(config)
    assert made == {str(chosen)}
    assert chosen != taken and chosen.stat().st_uid == os.getuid()
    assert not caplog.records, "it was logged by the process that chose the name"
    taken.rmdir()
    assert arena_dir.prepare(config) == chosen, "also after the other user has given the name up"


def test_a_name_that_is_taken_again_is_given_up(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    take(paths.arena_dir(config))
    first = arena_dir.prepare(config)
    first.rmdir()
    take(first)
    with caplog.at_level(logging.WARNING):
        second = arena_dir.prepare(config)
    assert second.name not in (first.name, "")
    line = vars(caplog.records[-1])
    assert line["message"] == "the arena directory belongs to another user; the arenas go elsewhere"
    assert (line["path"], line["owner"], line["arenas"]) == (str(first), OTHER, str(second))


def test_a_link_of_another_user_is_not_followed(config: Config, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir(mode=0o700)
    link = paths.arena_dir(config)
    link.symlink_to(target)
    assert arena_dir.prepare(config) == target, "a link of this user is its own business"
    if os.getuid():
        pytest.skip("only root can create the link of another user")
    os.lchown(link, OTHER, OTHER)
    assert arena_dir.prepare(config) not in (link, target)
    with pytest.raises(ConfigError, match=f"is a symbolic link of user {OTHER}: set server.run_dir"):
        run_dir.prepare(link)


def test_a_mode_that_lets_others_in_is_refused(config: Config) -> None:
    paths.arena_dir(config).mkdir(mode=0o700)
    paths.arena_dir(config).chmod(0o755)
    with pytest.raises(ConfigError, match="arena directory .* has mode 755"):
        arena_dir.prepare(config)


@pytest.mark.parametrize("name", ["", "../../etc", "starling-0-xyz", "x" * 1000, "\n"])
def test_a_record_that_is_not_a_name_is_ignored(config: Config, name: str) -> None:
    expected = paths.arena_dir(config)
    (Path(config.server.run_dir) / paths.ARENA_NAME_FILE).write_text(name)
    assert paths.arena_dir(config) == expected
