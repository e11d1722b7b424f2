"""Which lines of the modules under test inputs reach, and the few inputs that reach all of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from tools.fuzz.guard import guarded
from tools.fuzz.target import Target

Arc = tuple[str, int, int]  # file, line, next line


class Coverage:
    """Arcs between lines in the modules of a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        modules = [importlib.import_module(name) for name in target.modules]
        self._files = {module.__file__ for module in modules}
        self.lines = {(str(m.__file__), line) for m in modules for line in _lines_of_functions(str(m.__file__))}
        self.reached: set[tuple[str, int]] = set()
        self._arcs: set[Arc] = set()

    def of(self, data: bytes) -> set[Arc]:
        """The arcs that one input takes. A finding is not reported here."""
        self._arcs = set()
        with guarded(self.target, cpu_s=60.0) as guard:
            sys.settrace(self._on_call)
            try:
                guard.check(data)
            finally:
                sys.settrace(None)
        self.reached |= {(file, line) for file, _, line in self._arcs} & self.lines
        return self._arcs

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._files:
            return None
        arcs, last = self._arcs, 0

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                arcs.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return on_line

        return on_line


def minimized(target: Target, inputs: Iterable[bytes], max_bytes: int) -> tuple[list[bytes], Coverage]:
    """The inputs that reach an arc that no smaller one reaches, of at most `max_bytes` together, and their coverage."""
    coverage = Coverage(target)
    kept: list[bytes] = []
    seen: set[Arc] = set()
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        arcs = coverage.of(data)
        if not arcs <= seen and sum(map(len, kept)) + len(data) <= max_bytes:
            seen |= arcs
            kept.append(data)
    return kept, coverage


def _lines_of_functions(file: str) -> set[int]:
    """Lines with code inside functions: the rest ran when the module was imported."""
    with open(file, "rb") as source:
        module = compile(source.read(), file, "exec")
    lines: set[int] = set()
    codes = [code for code in module.co_consts if isinstance(code, CodeType)]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        if "__module__" not in code.co_names and "__qualname__" not in code.co_names:  # not the body of a class
            lines |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
    return lines
