"""Directories follow from the environment and the configuration alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config import addresses, paths
from pipeline.config.load import resolve
from pipeline.errors import ConfigError

DEFAULT = resolve({}, {})
ENV = {"STARLING_HOME": "/data/starling"}


def test_home() -> None:
    assert paths.home(ENV) == Path("/data/starling")
    assert paths.home({"HOME": "/home/me"}) == Path("/home/me/.starling")
    assert paths.home({"STARLING_HOME": "here"}) == Path.cwd() / "here"
    assert paths.home({"HOME": "/home/me", "STARLING_HOME": "~//data"}) == Path("/home/me/data")
    with pytest.raises(ConfigError, match="STARLING_HOME = '~no-such-user/x': there is no such user"):
        paths.home({"STARLING_HOME": "~no-such-user/x"})


def test_one_function_expands_the_home_directory() -> None:
    """Python's own takes an empty HOME for the root directory."""
    root = Path(paths.__file__).parents[2]
    files = [path for name in ("pipeline", "stages", "starling") for path in (root / name).rglob("*.py")]
    assert [path.name for path in files if "expanduser" in path.read_text()] == ["user_home.py"]


def test_directories_below_home() -> None:
    assert paths.models_dir(ENV) == Path("/data/starling/models")
    assert paths.run_dir(DEFAULT, ENV) == Path("/data/starling/run")
    assert paths.state_dir(DEFAULT, ENV) == Path("/data/starling/state")
    assert paths.cache_dir(ENV) == Path("/data/starling/cache")
    assert paths.logs_dir(ENV) == Path("/data/starling/logs")


def test_configured_directories_win() -> None:
    config = resolve({"server": {"run_dir": "/r", "state_dir": "/s", "arena_dir": "/a"}}, {})
    assert paths.run_dir(config, ENV) == Path("/r")
    assert paths.state_dir(config, ENV) == Path("/s")
    assert paths.arena_dir(config, ENV).parent == Path("/a")


def test_arena_directories_are_stable_and_unique() -> None:
    first = paths.arena_dir(DEFAULT, ENV)
    assert first == paths.arena_dir(DEFAULT, ENV)
    assert first.parent == Path("/dev/shm")
    assert first.name.startswith(f"starling-{os.getuid()}-")
    assert len(first.name.rsplit("-", 1)[1]) == 12
    assert first != paths.arena_dir(DEFAULT, {"STARLING_HOME": "/data/other"})


def test_arenas_follow_the_real_run_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    real = paths.arena_dir(DEFAULT, {"STARLING_HOME": str(tmp_path / "real")})
    assert paths.arena_dir(DEFAULT, {"STARLING_HOME": str(tmp_path / "link")}) == real


def test_edge_addresses() -> None:
    assert addresses.edge_address(DEFAULT, "scheduler-kv", ENV) == "ipc:///data/starling/run/scheduler-kv.sock"
    config = resolve({"edges": {"scheduler-kv": "tcp://127.0.0.1:7001"}}, {})
    assert addresses.edge_address(config, "scheduler-kv", ENV) == "tcp://127.0.0.1:7001"


def test_a_socket_path_that_is_too_long_is_refused_with_its_length() -> None:
    longest = "/" + "x" * (addresses.SOCKET_PATH_MAX - len("//run/scheduler-kv.sock"))
    address = addresses.edge_address(DEFAULT, "scheduler-kv", {"STARLING_HOME": longest})
    assert len(address.removeprefix("ipc://")) == addresses.SOCKET_PATH_MAX
    with pytest.raises(ConfigError, match="has 107 bytes, and the system allows 106") as caught:
        addresses.edge_address(DEFAULT, "scheduler-kv", {"STARLING_HOME": longest + "x"})
    assert caught.value.param == "server.run_dir"
