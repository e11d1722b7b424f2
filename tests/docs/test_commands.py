"""Every block tagged `run` or `serve` in the documentation runs as it stands.

The blocks of a page run in order in the checkout, against one server with a home of its own. The server of a page is
the one that its `serve` block starts; pages without one share the demo server. Port 8080 of the text is replaced by a
free port.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import ROOT, Server
from tests.e2e.up_server import Up
from tools.checks import markdown

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
# An error answer; the API's description also has properties of this name.
ERROR = re.compile(r'"error":\s*\{\s*"(?:message|type|code)":\s*"(?!object")')


class ServeBlock(Up):
    """A server that a shell block of the documentation starts, in a shell of its own."""

    def __init__(self, home: Path, text: str) -> None:
        super().__init__(home, {})
        self.command = ["bash", "-euc", text]


def tagged(tag: str) -> dict[str, list[markdown.Block]]:
    """The shell and Python blocks with a tag, by page."""
    found = {}
    for page in markdown.pages(ROOT):
        blocks = [block for block in markdown.blocks(page.read_text()) if block.info in (f"sh {tag}", f"python {tag}")]
        if blocks:
            found[str(page.relative_to(ROOT))] = blocks
    return found


def run(block: markdown.Block, server: Server) -> None:
    """Run one block; it must exit with 0."""
    text = block.text.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    program = ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(
        program,
        cwd=ROOT,
        env=server.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    assert not ERROR.search(done.stdout), done.stdout[-2000:]


@pytest.fixture
def home(tmp_path: Path, demo_gguf: Path) -> Path:
    """A home with the prepared demo model and the compiled kernels."""
    share_caches(tmp_path, models=True)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in tagged("run") if page not in tagged("serve")])
def test_the_commands_of_a_page_run(page: str, home: Path) -> None:
    with Server(home, {}) as server:
        for block in tagged("run")[page]:
            run(block, server)


@pytest.mark.parametrize("page", list(tagged("serve")))
def test_a_page_that_starts_a_server(page: str, home: Path) -> None:
    """The block starts the server, the page's other blocks run against it, and Ctrl-C leaves nothing."""
    (serve,) = tagged("serve")[page]
    with ServeBlock(home, serve.text) as server:
        for block in tagged("run").get(page, []):
            run(block, server)
        assert server.stop(signal.SIGINT) in (0, -signal.SIGINT)  # a shell ends by the signal that its job received
    assert server.leftovers() == []


def test_a_block_that_fails_is_found(home: Path) -> None:
    """The runner fails for a wrong exit code and for an error answer of the server."""
    with Server(home, {}) as server:
        run(markdown.Block(1, "sh run", "starling status"), server)
        with pytest.raises(AssertionError):
            run(markdown.Block(1, "sh run", "starling status --no-such-option"), server)
        with pytest.raises(AssertionError):
            run(markdown.Block(1, "sh run", "curl -s http://127.0.0.1:8080/v1/generate -d '{}'"), server)
