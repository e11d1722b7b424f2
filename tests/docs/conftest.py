"""One container engine for the tests that build and run images: its base image is made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.docs.container_engine import Engine, Unavailable


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if not shutil.which("podman"):
        pytest.skip("not installed: podman")
    try:
        with Engine(tmp_path_factory.mktemp("podman")) as engine:
            yield engine
    except Unavailable as e:
        pytest.skip(str(e))
