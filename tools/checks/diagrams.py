"""Every Mermaid block in the documentation parses with Mermaid's own parser.

The wheel `mermaid-parser-py` ships the parser of mermaid.js as one JavaScript file; V8 (`mini-racer`) runs it. Nothing
is rendered and no network is used.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from py_mini_racer import JSPromise, MiniRacer

from tools.checks import markdown

BUNDLE = "mermaid_parser/js/parser.bundle.js"
TIMEOUT_S = 30.0

# What the bundle expects of its host: CommonJS, a console, and timers that run at once.
HOST = """
var module = {exports: {}}, exports = module.exports, window = globalThis;
var console = {log() {}, error() {}, warn() {}, info() {}, debug() {}, trace() {}};
var structuredClone = (value) => JSON.parse(JSON.stringify(value));
var setTimeout = (call) => { Promise.resolve().then(call); };
function require(name) {
    if (name === 'util') return {inspect: String};
    throw new Error(name);
}
"""


@cache
def parser() -> Callable[[str], str]:
    """A function from a diagram's source to the parser's error; an empty string when it parses."""
    files = importlib.metadata.files("mermaid-parser-py") or []
    bundle = next(file for file in files if str(file) == BUNDLE).locate()
    context = MiniRacer()
    context.eval(HOST)
    context.eval(Path(str(bundle)).read_text() + "\n0")

    def parse(source: str) -> str:
        call = (
            f"(async () => {{ try {{ await module.exports({json.dumps(source)}); return '' }}"
            " catch (error) { return String(error && error.message) || 'unknown error' } })()"
        )
        promise = context.eval(call)
        assert isinstance(promise, JSPromise)
        return str(promise.get(timeout=TIMEOUT_S))

    return parse


def problems(root: Path) -> Iterator[str]:
    """One line per diagram that does not parse."""
    for page in markdown.pages(root):
        for block in markdown.blocks(page.read_text()):
            if block.language == "mermaid":
                error = parser()(block.text)
                if error:
                    where = f"{page.relative_to(root)}:{block.line}"
                    yield f"{where}: Mermaid does not parse it: {' | '.join(error.splitlines())}"
