"""Import rules between layers, between stages, and around sockets.

- Layers: starling -> stages -> pipeline -> shm. A stage imports no other stage.
- Within a stage only stage.py uses sockets. aiohttp may be imported for its requests and responses, and asyncio for its
  tasks; their listeners and clients may not be named.
- No `importlib.import_module` and no `__import__`: they would hide an import from the first rule. A lazy import is an
  import statement inside a function.

The check reads the source only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# What a top-level package may import of the project.
MAY_IMPORT = {
    "shm": {"shm"},
    "pipeline": {"pipeline", "shm"},
    "stages": {"stages", "pipeline", "shm"},
    "starling": {"starling", "stages", "pipeline", "shm"},
}
SOCKET_MODULES = {"zmq", "socket", "socketserver", "http", "urllib"}
AIOHTTP_NAMES = {"AppRunner", "TCPSite", "UnixSite", "SockSite", "run_app", "ClientSession"}
ASYNCIO_NAMES = {  # methods of an event loop, and what opens streams
    *("create_connection", "create_server", "create_unix_connection", "create_unix_server", "create_datagram_endpoint"),
    *("open_connection", "open_unix_connection", "start_server", "start_unix_server"),
}
SOCKET_NAMES = AIOHTTP_NAMES | ASYNCIO_NAMES
# Project modules that hold sockets: what uses them does a stage's input and output.
SOCKET_HOLDERS = {"pipeline.ipc.endpoint", "pipeline.ipc.poll_loop", "pipeline.ipc.asyncio_loop"}
# Calls that import a module by a computed name, which this check cannot see.
IMPORT_FUNCTIONS = {"import_module", "__import__"}


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, relative ones made absolute; names included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}".strip(".")


def names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every attribute and plain name that is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id


def violations(path: Path, root: Path) -> Iterator[str]:
    """One line for each rule that the file breaks."""
    parts = path.relative_to(root).with_suffix("").parts
    layer = parts[0]
    stage = parts[1] if layer == "stages" and len(parts) > 2 else ""
    is_input_output = layer != "stages" or parts[-1] == "stage"
    where = path.relative_to(root)
    seen: set[tuple[int, str]] = set()
    tree = ast.parse(path.read_text(), str(path))
    if not is_input_output:
        for line, name in (*names_used(tree), *imports(tree, ())):
            if name.rpartition(".")[2] in SOCKET_NAMES:
                yield f"{where}:{line}: only stage.py touches sockets, and this is {name}"
    for line, name in (*names_used(tree), *imports(tree, ())):
        function = name.rpartition(".")[2]
        if function in IMPORT_FUNCTIONS:
            yield f"{where}:{line}: write an import statement, inside a function if it must be lazy, not {function}"
    for line, name in imports(tree, parts[:-1]):
        top, _, rest = name.partition(".")
        rule = ""
        if top in MAY_IMPORT or top in ("tests", "tools"):
            if top not in MAY_IMPORT[layer]:
                rule = f"{layer} must not import {top}"
            elif top == "stages" and stage and rest.split(".")[0] not in (stage, ""):
                rule = f"stage {stage} must not import stage {rest.split('.')[0]}"
        if not is_input_output and (top in SOCKET_MODULES or ".".join(name.split(".")[:3]) in SOCKET_HOLDERS):
            rule = f"only stage.py touches sockets, and this is {top}" + (f".{rest}" if rest else "")
        if rule and (line, rule) not in seen:
            seen.add((line, rule))
            yield f"{where}:{line}: {rule}"


def problems(root: Path) -> Iterator[str]:
    """One line per broken rule in the product's packages."""
    for layer in MAY_IMPORT:
        for path in sorted((root / layer).rglob("*.py")):
            yield from violations(path, root)
