"""Every endpoint has a page in docs/api with a curl and a Python example, which `test_commands.py` runs."""

from __future__ import annotations

import pytest

from stages.gateway.openapi.operations import OPERATIONS
from tests.e2e.server import ROOT
from tools.checks import markdown

API = ROOT / "docs" / "api"
# The index and the table; the page for browsers; a feature that is off by default.
WITHOUT_EXAMPLES = ("README.md", "compatibility.md", "page.md", "response-cache.md")
PAGES = sorted(page.name for page in API.glob("*.md"))


@pytest.mark.parametrize("name", [name for name in PAGES if name not in WITHOUT_EXAMPLES])
def test_a_page_has_examples_that_a_test_runs(name: str) -> None:
    blocks = list(markdown.blocks((API / name).read_text()))
    assert any(block.info == "sh run" and "curl" in block.text for block in blocks)
    assert any(block.info == "python run" for block in blocks)


def test_every_route_is_on_a_page() -> None:
    text = "".join((API / name).read_text() for name in PAGES)
    for _, path in OPERATIONS:
        base = path.partition("/{")[0]
        assert f"`{base}" in text or f" {base}" in text or f"{base}`" in text, path


def test_the_index_names_every_page() -> None:
    index = (API / "README.md").read_text()
    assert [name for name in PAGES if name != "README.md" and f"({name})" not in index] == []
