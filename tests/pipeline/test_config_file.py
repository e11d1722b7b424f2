"""Configuration files: the values of the last one are kept, so that it is parsed once; names of log levels."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config.file import read_file
from pipeline.config.load import resolve
from pipeline.errors import ConfigError


def test_a_file_read_again_gives_values_of_its_own_and_never_old_ones(tmp_path: Path) -> None:
    """The last file's values are kept: neither a caller that changes them nor another file is seen by the next one."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.toml"
    first.write_text("server: {port: 1}\n")
    second.write_text("server: {port: 1}\n")  # no TOML
    for _ in range(3):
        values = read_file(first)
        assert values == {"server": {"port": 1}}
        values["server"]["port"] = 2
    with pytest.raises(ConfigError, match="not TOML"):
        read_file(second)
    first.write_text("server: {port: 3}\n")
    assert read_file(first) == {"server": {"port": 3}}


def test_another_file_read_meanwhile_gives_no_values_to_this_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("server: {port: 1}\n")
    second.write_text("server: {port: 2}\n")

    class Interrupted(type(first)):  # type: ignore[misc]
        @property
        def suffix(self) -> str:
            """Another thread reads its file while this one compares."""
            read_file(second)
            return ".yaml"

    read_file(first)
    assert read_file(Interrupted(first)) == {"server": {"port": 1}}


def test_a_file_that_has_not_changed_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "starling.yaml"
    path.write_text("server: {port: 4711}\n")
    values = read_file(path)
    monkeypatch.setattr(yaml, "load", None)
    assert read_file(path) == values
    path.write_text("server: {port: 4712}\n")
    with pytest.raises(ConfigError, match="not YAML"):
        read_file(path)


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ("warn", "warning"),
        ("WARNING", "warning"),
        ("Info", "info"),
        ("DEBUG", "debug"),
        ("trace", "debug"),
        (" ERROR ", "error"),
    ],
)
def test_log_levels_may_have_the_names_of_other_programs(given: str, level: str) -> None:
    for variable in ("LLM_ENGINE_LOG_LEVEL", "STARLING_LOGGING__LEVEL"):
        assert resolve({}, {variable: given}).logging.level == level
    assert resolve({"logging": {"level": given}}, {}).logging.level == level


@pytest.mark.parametrize("given", ["LOUD", "", "warns", 30, None, False])
def test_other_log_levels_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=f"{given!r}: expected one of debug, info, warning, error"):
        resolve({"logging": {"level": given}}, {})
