"""Log levels set at run time: which one applies, that processes follow, and that commands do not undo each other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.observe import log_levels
from pipeline.observe.log_levels import FILE, LogLevelFollower, change, current, level_of, read


@pytest.fixture(autouse=True)
def level_before() -> Iterator[None]:
    logger = logging.getLogger("starling")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.parametrize(
    ("levels", "stage", "expected"),
    [
        ({}, "kv", "info"),
        ({"": "error"}, "kv", "error"),
        ({"": "error", "kv": "debug"}, "kv", "debug"),
        ({"kv": "debug"}, "scheduler", "info"),
        ({"worker": "debug"}, "worker-tiny", "debug"),
        ({"worker": "debug", "worker-tiny": "error"}, "worker-tiny", "error"),
        ({"worker-tiny": "debug"}, "worker-other", "info"),
    ],
)
def test_the_most_specific_level_applies(levels: dict[str, str], stage: str, expected: str) -> None:
    assert level_of(levels, stage, "info") == expected


def test_a_level_of_all_replaces_those_of_stages(tmp_path: Path) -> None:
    assert change(tmp_path, "kv", "debug") == {"kv": "debug"}
    assert change(tmp_path, "worker-a", "debug") == {"kv": "debug", "worker-a": "debug"}
    assert change(tmp_path, "worker", "error") == {"kv": "debug", "worker": "error"}
    assert change(tmp_path, "", "warning") == {"": "warning"}
    assert change(tmp_path, "kv", "") == {"": "warning"}
    assert change(tmp_path, "", "") == {}
    assert not (tmp_path / FILE).exists()


def test_a_process_follows_and_returns_to_the_configured_level(tmp_path: Path) -> None:
    logging.getLogger("starling").setLevel(logging.INFO)
    follower = LogLevelFollower(tmp_path, "kv", "info")
    assert current() == "info"
    for levels, expected in [("debug", "debug"), ("error", "error"), ("", "info")]:
        change(tmp_path, "", levels)
        follower.poll()
        assert current() == expected
    change(tmp_path, "kv", "debug")
    LogLevelFollower(tmp_path, "kv", "info")  # a successor of the stage
    assert current() == "debug"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"kv": 3}', b'{"kv": "loud"}', b"\xff" * 100])
def test_a_damaged_file_sets_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert read(tmp_path) == {}


def test_concurrent_commands_lose_no_change(tmp_path: Path) -> None:
    names = [f"worker-{n}" for n in range(16)]
    threads = [threading.Thread(target=change, args=(tmp_path, name, "debug")) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log_levels.read(tmp_path) == dict.fromkeys(names, "debug")
