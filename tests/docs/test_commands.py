"""Every tagged block of the documentation runs as it stands, but for addresses and folders (tests/docs/page.py).

Tags are explained in tools/checks/commands.py. Blocks tagged `deploy` run in tests/docs/test_deploy.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.page import Pages, run
from tests.e2e.server import ROOT
from tools.checks import markdown
from tools.checks.commands import RUN_BY_TESTS

pytestmark = pytest.mark.slow


def tagged() -> dict[str, list[markdown.Block]]:
    """The shell and Python blocks that run here, by page."""
    found = {}
    for page in markdown.pages(ROOT):
        blocks = [block for block in markdown.blocks(page.read_text()) if block.info.split()[1:2] != []]
        if blocks := [block for block in blocks if block.info.split()[1] in RUN_BY_TESTS]:
            found[str(page.relative_to(ROOT))] = blocks
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, demo_gguf: object) -> Iterator[Pages]:
    with Pages(tmp_path_factory.mktemp("docs")) as pages:
        yield pages


@pytest.mark.parametrize("page", list(tagged()))
def test_the_commands_of_a_page_run(page: str, pages: Pages) -> None:
    if left_out := pages.run(page, tagged()[page]):
        pytest.skip(f"the other blocks have run; these are not installed: {', '.join(left_out)}")


def test_a_block_that_fails_is_found(pages: Pages) -> None:
    """The runner fails for a wrong exit code and for an error answer of the server."""
    server = pages.shared()
    run(markdown.Block(1, "sh run", "starling config >/dev/null"), server, server.home)
    with pytest.raises(AssertionError):
        run(markdown.Block(1, "sh run", "starling status --no-such-option"), server, server.home)
    with pytest.raises(AssertionError):
        run(markdown.Block(1, "sh run", "curl -s http://127.0.0.1:8080/v1/generate -d '{}'"), server, server.home)
