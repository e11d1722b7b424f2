"""The command that installs an extra names the extra's packages."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from pipeline.extras import how_to_install

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_of_an_extra_are_named(extra: str) -> None:
    command = shlex.split(how_to_install(extra))
    assert command[:2] == ["pip", "install"]
    assert sorted(command[2:]) == sorted(one.partition(";")[0].replace(" ", "") for one in EXTRAS[extra])


def test_an_extra_that_is_not_in_the_metadata_still_has_a_remedy() -> None:
    assert "`none`" in how_to_install("none")
