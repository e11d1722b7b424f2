"""No import cycles between modules of the product, imports under `TYPE_CHECKING` and inside functions included.

A cycle means that two modules cannot be understood apart. The check finds the strongly connected components of the
import graph (Tarjan, 1972) and reports each component of more than one module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("shm", "pipeline", "stages", "starling", "tools")


def module_name(path: Path, root: Path) -> str:
    """The dotted name of the module in `path`; a package's `__init__.py` has the package's name."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph(root: Path) -> dict[str, set[str]]:
    """The modules that each module of the product imports, by dotted name."""
    files = {module_name(path, root): path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))}
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        is_package = path.name == "__init__.py"
        edges[name] = set(_imported(ast.parse(path.read_text(), str(path)), name, is_package, files)) - {name}
    return edges


def _imported(tree: ast.AST, name: str, is_package: bool, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if is_package else name.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                # `from package import module` depends on the module; any other name on the package itself.
                target = f"{source}.{alias.name}"
                if target in known:
                    yield target
                elif source in known:
                    yield source


def components(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """The strongly connected components with more than one module, each sorted by name."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(edges[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component: list[str] = []
            while not component or component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    yield from found


def problems(root: Path) -> Iterator[str]:
    """One line per cycle."""
    for component in components(graph(root)):
        yield f"{', '.join(component)}: import each other; pass a collaborator in, or give the shared part a module"
