"""The blocks of the documentation tagged `deploy`, for example a wheel installed by pipx.

They need minutes, a package index, and the programs that their tags name; `make test-deploy` runs them. The last
command of each serves, and is ended by Ctrl-C once the server is ready. Containers run in
tests/docs/test_container.py and test_compose.py, the Debian package in tests/docs/test_debian_package.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.page import DEPLOY_S, ServeBlock, missing
from tests.e2e.conftest import share_caches
from tests.e2e.server import ROOT
from tools.checks import markdown

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * DEPLOY_S),
    pytest.mark.skipif(not os.environ.get("STARLING_TEST_DEPLOY"), reason="takes minutes: make test-deploy"),
]


def blocks() -> Iterator[tuple[str, markdown.Block]]:
    """Each block with its page and line."""
    for page in markdown.pages(ROOT):
        for block in markdown.blocks(page.read_text()):
            kind, *programs = block.info.split()[1:] or [""]
            if kind == "deploy" and not {"dpkg", "podman", "podman-compose"} & {*programs}:
                yield f"{page.relative_to(ROOT)}:{block.line}", block


@pytest.mark.parametrize("block", [pytest.param(block, id=where) for where, block in blocks()])
def test_a_way_to_deploy(block: markdown.Block, tmp_path: Path, demo_gguf: Path) -> None:
    if lacking := missing(block):
        pytest.skip(f"not installed: {', '.join(lacking)}")
    home = tmp_path / "home"
    home.mkdir()
    share_caches(home, models=True)
    server = ServeBlock(home, block.text, {}, tmp_path)
    server.start_s = DEPLOY_S
    # What pipx makes goes to the test's folder; pip keeps its cache.
    server.environment |= {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    server.environment["PATH"] = f"{tmp_path / 'bin'}:{server.environment['PATH']}"
    del server.environment["PYTHONPATH"]
    with server:
        assert server.request("GET", "/ready")[0] == 200
        assert server.stop(signal.SIGINT) in (0, 130, -signal.SIGINT)
