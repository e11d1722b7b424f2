"""One gateway between scripted peers, and one browser, for the tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.server import Server
from tests.web.browser import CHROMIUM, MISSING, Browser, Page
from tools.ports import free_port

KEYS = [{"key": "sk-user", "tenant": "readers"}, {"key": "sk-admin", "tenant": "operators", "admin": True}]


@pytest.fixture(scope="package")
def home() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    base = Path(tempfile.mkdtemp(prefix="web-"))
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="package")
def browser(home: Path) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip(MISSING)
    running = Browser(home / "profile")
    yield running
    running.close()


@pytest.fixture(scope="package")
def server(browser: Browser, home: Path) -> Iterator[Server]:
    """A server whose port its successors have too."""
    running = Server(home / "open", server={"port": free_port()}, scheduler={"max_output_tokens": 300})
    running.wait_ready()
    yield running
    running.close()


@pytest.fixture(scope="package")
def guarded(browser: Browser, home: Path) -> Iterator[Server]:
    """A server that asks for an API key, and that pages of other origins may use."""
    running = Server(home / "guarded", auth={"api_keys": KEYS}, server={"enable_cors": True})
    running.wait_ready()
    yield running
    running.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; they must end without an exception and without a violation of their policy."""
    pages: list[Page] = []

    def open_one(url: str, **size: int | bool) -> Page:
        pages.append(browser.open(url, **size))
        return pages[-1]

    yield open_one
    found = [problem for page in pages for problem in page.problems()]
    for page in pages:
        page.close()
    assert found == []
