"""Every endpoint has a page in docs/api with a curl and a Python example, which `test_commands.py` runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

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


# Operations that only one form of example shows, or none: they change what the server has loaded.
ADMINISTRATION = re.compile(r"/v1/admin/|lora")
# The operations behind the methods of the official clients.
CLIENTS = {
    "chat.completions.create": ("POST", "/v1/chat/completions"),
    "chat.completions.parse": ("POST", "/v1/chat/completions"),
    "completions.create": ("POST", "/v1/completions"),
    "embeddings.create": ("POST", "/v1/embeddings"),
    "models.list": ("GET", "/v1/models"),
    "models.retrieve": ("GET", "/v1/models/{id}"),
    "messages.stream": ("POST", "/v1/messages"),
    "messages.count_tokens": ("POST", "/v1/messages/count_tokens"),
    "responses.create": ("POST", "/v1/responses"),
    "responses.stream": ("POST", "/v1/responses"),
    "responses.retrieve": ("GET", "/v1/responses/{id}"),
    "responses.cancel": ("POST", "/v1/responses/{id}/cancel"),
    "responses.delete": ("DELETE", "/v1/responses/{id}"),
    "responses.input_items.list": ("GET", "/v1/responses/{id}/input_items"),
    "conversations.create": ("POST", "/v1/conversations"),
    "conversations.retrieve": ("GET", "/v1/conversations/{id}"),
    "conversations.update": ("POST", "/v1/conversations/{id}"),
    "conversations.delete": ("DELETE", "/v1/conversations/{id}"),
    "conversations.items.create": ("POST", "/v1/conversations/{id}/items"),
    "conversations.items.list": ("GET", "/v1/conversations/{id}/items"),
    "conversations.items.retrieve": ("GET", "/v1/conversations/{id}/items/{item}"),
    "conversations.items.delete": ("DELETE", "/v1/conversations/{id}/items/{item}"),
}
URL = re.compile(r"127\.0\.0\.1:8080(/[^\s\"'?]*)")
PYTHON_PATH = re.compile(r"(?:8080|SERVER \+ |SERVER\}|post\()\"?(/[^\s\"'?,)]+)")


def matching(method: str, path: str) -> tuple[str, str] | None:
    """The operation of a request whose path has variables of a shell or of Python."""
    parts = re.sub(r"\$\w+|\{\w+\}|smollm2-135m-instruct", "*", path).split("/")
    for known, pattern in OPERATIONS:
        names = pattern.split("/")
        pairs = zip(parts, names)
        is_same = all(part == name or (part == "*" and name.startswith("{")) for part, name in pairs)
        if is_same and known.upper() == method and len(names) == len(parts):
            return known, pattern
    return None


def in_shell(text: str) -> Iterator[tuple[str, str] | None]:
    """The operations of the curl commands of a block."""
    for command in re.split(r"\bcurl\b", text.replace("\\\n", " "))[1:]:
        if found := URL.search(command):
            named = re.search(r"-X (\w+)", command)
            yield matching(named[1] if named else "POST" if re.search(r"\s-d\s", command) else "GET", found[1])


def in_python(text: str) -> Iterator[tuple[str, str] | None]:
    """The operations of a block's calls, by the official clients or by urllib."""
    for name, operation in CLIENTS.items():
        if re.search(rf"client\.{re.escape(name)}\(", text):
            yield operation
    for found in PYTHON_PATH.finditer(text.replace('" + path', "")):
        for method in ("GET", "POST", "DELETE"):
            if method != "DELETE" or 'method="DELETE"' in text:
                yield matching(method, found[1])


def test_every_operation_has_a_curl_and_a_python_example() -> None:
    shown: dict[str, set[tuple[str, str] | None]] = {"sh": set(), "python": set()}
    for name in PAGES:
        for block in markdown.blocks((API / name).read_text()):
            if block.info == "sh run":
                shown["sh"].update(in_shell(block.text))
            elif block.info == "python run":
                shown["python"].update(in_python(block.text))
    wanted = {(method, path) for method, path in OPERATIONS if not ADMINISTRATION.search(path)}
    assert wanted - shown["sh"] == set()
    assert {path for _, path in wanted - shown["python"]} == {"/v1/engines", "/v1/engines/{id}"}  # of an older client
