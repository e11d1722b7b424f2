"""The Jinja sandbox of chat templates: bounds on the time and memory of one rendering.

A template is a program from a model file.  Jinja's immutable sandbox restricts what it can reach, not how long it runs
or how much it allocates.  Here the syntax tree is changed so that each loop iteration, `~`, slice and nested literal is
counted; the environment counts operators, filters, methods and comparisons of lists.  An operation whose result can be
much larger than its operands (`*`, `**`, `%`, `replace`, `join`, padding), or that takes long for its operands (`sort`,
`title`, `rfind`), is counted before it runs.  Filters and methods outside the lists of template_names.py are not
available.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from stages.tokenizer.chat_messages import WrittenArguments
from stages.tokenizer.template_names import (
    COMPARING_TESTS,
    ELEMENT_FILTERS,
    FILTERS,
    ITERATING_FILTERS,
    LAZY_FILTERS,
    METHODS,
    NESTED_FILTERS,
    PRODUCT_METHODS,
    SPLIT_METHODS,
)

MAX_CPU_S = 0.5  # of a rendering; a chat of 4,096 messages takes about 0.1 s
MAX_CHARACTERS = 128 << 20  # of all intermediate strings of a rendering; an element of a list counts as `ELEMENT`
ELEMENT = 8
PART = 64  # of a string that is a part of another
KEY = 128  # of an element that Python code runs for: a million of them are allowed
COMPARED = 16  # characters compared, in a search whose time is the product of two lengths, for each one counted
VISITED = 4096  # elements of a list between two checks of the clock
MAX_INT_BITS = 1 << 14
MAX_FORMAT = 1 << 16  # characters of a format string
MAX_INDENT = 1000  # characters that `tojson` and `indent` put before a line

_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #.0-9]*(?:[0-9]{4}|\*)")
_WIDE_BRACE = re.compile(r"\{[^{}]*:[^{}]*(?:[0-9]{4}|\{)")


class RenderLimit(Exception):
    """A rendering exceeds its time or its memory."""


class _Generation(Extension):
    """`{% generation %}`: templates enclose in it what an assistant said, for training. It has no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the enclosed statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Budget(threading.local):
    """What the rendering of this thread may still use."""

    is_rendering = False
    characters = 0
    deadline = 0.0
    calls = 0


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """`parse_bounded` makes syntax trees whose rendering, between `start` and `stop`, raises `RenderLimit`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,
            finalize=self._finalize,
        )
        self.budget = _Budget()
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals.pop("lipsum", None)
        self.filters = {name: self._bounded_filter(name, self.filters[name]) for name in FILTERS}
        self.filters |= {
            "tojson": self._tojson,
            "bounded_iterate": self._iterate,
            "bounded_concat": lambda parts: self._concat([self._text(part) for part in parts]),
            "bounded_size": self._size,
            "bounded_sum": self._sum,
            "bounded_compared": self._compared,
            "bounded_members": self._members,
        }
        self.tests |= {name: self._bounded_test(compare) for name, compare in COMPARING_TESTS.items()}
        self.tests["in"] = lambda value, members: value in self._members(members)

    def start(self) -> None:
        """Begin a rendering in this thread."""
        budget = self.budget
        budget.characters, budget.calls = MAX_CHARACTERS, 0
        budget.deadline = time.thread_time() + MAX_CPU_S
        budget.is_rendering = True

    def stop(self) -> None:
        """End the rendering of this thread."""
        self.budget.is_rendering = False

    def charge(self, characters: int) -> None:
        """Count an operation. Raises `RenderLimit`."""
        budget = self.budget
        if not budget.is_rendering:
            raise nodes.Impossible  # constant folding of the compiler: leaves the operation to the rendering
        budget.characters -= characters
        if budget.characters < 0:
            raise RenderLimit(f"it needs strings of more than {MAX_CHARACTERS} characters")
        budget.calls += 1
        if (not budget.calls & 31 or characters > 65536) and time.thread_time() > budget.deadline:
            raise RenderLimit(f"it takes more than {MAX_CPU_S} s")

    def parse_bounded(self, source: str) -> nodes.Template:
        """Parse a template and insert the counting."""
        tree: nodes.Template = _Counting(self).visit(self.parse(source))
        return tree

    # -------------------------------------------------------------- operations

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Count an operator before it runs."""
        if operator == "+":
            return self._add(left, right)
        if operator == "%":
            if isinstance(left, bytes):
                raise SecurityError("bytes cannot be formatted")
            if isinstance(left, str):
                self._check_format(left, _WIDE_PERCENT, "%", right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INT_BITS:
                raise RenderLimit(f"it computes numbers of more than {MAX_INT_BITS} bits")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    self.charge(max(0, len(one) * other) * (1 if isinstance(one, str) else ELEMENT))
        return super().call_binop(context, operator, left, right)

    def _add(self, left: Any, right: Any) -> Any:
        if left.__class__ is str and right.__class__ is str:
            self.charge(len(left) + len(right))
        elif isinstance(left, str | bytes | list | tuple) and isinstance(right, Sized):
            self.charge((len(left) + len(right)) * (1 if isinstance(left, str) else ELEMENT))
        return left + right

    def _sum(self, parts: list[Any]) -> Any:
        """Return `parts[0] + parts[1] + ...`; of strings, which a template writes most often, in one piece."""
        size = 0
        for part in parts:
            if part.__class__ is not str:
                return functools.reduce(self._add, parts)
            size += len(part)
        self.charge(size)
        return "".join(parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Count a call; refuse methods of built-in types that are not listed."""
        # Jinja passes its arguments like this, so that no keyword of a template can collide.
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `str.format`
        __self.charge(1)
        if isinstance(method, BuiltinMethodType):
            if method.__name__ == "join" and args and not isinstance(args[0], Sized):
                args = (list(__self._iterate(args[0])), *args[1:])
            __self._check_method(method, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return __self._size(result) if isinstance(result, dict) else __self._sized(result)

    def _check_method(self, method: BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner, name = method.__self__, method.__name__
        allowed = next((names for kind, names in METHODS.items() if isinstance(owner, kind)), frozenset[str]())
        if name not in allowed:
            raise SecurityError(f"the method {name!r} of {type(owner).__name__!r} is not available")
        if not isinstance(owner, str):
            if isinstance(owner, list | tuple) and name in ("index", "count"):
                self._compared(owner)
            return
        self.charge(len(owner))
        texts = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
        if name in PRODUCT_METHODS:
            self.charge(len(owner) * max([0, *map(len, texts)]) // COMPARED)
        if name in SPLIT_METHODS:
            # Without a separator it is unknown how many parts there are.
            self.charge(PART * owner.count(texts[0]) if texts and texts[0] else ELEMENT * len(owner))
        if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
            self.charge(owner.count(args[0]) * len(args[1]))
        elif name == "join" and args and isinstance(args[0], str | list | tuple | dict):
            self.charge(len(args[0]) * len(owner) + sum(len(part) for part in args[0] if isinstance(part, str)))
        elif name in ("center", "ljust", "rjust", "zfill"):
            self.charge(max([0, *(arg for arg in args if isinstance(arg, int))]))
        elif name == "expandtabs":
            self.charge(owner.count("\t") * max([8, *(a for a in (*args, *kwargs.values()) if isinstance(a, int))]))
        elif name in ("format", "format_map"):
            self._check_format(owner, _WIDE_BRACE, "{", (args, kwargs))

    def _check_format(self, form: str, wide: re.Pattern[str], sign: str, values: Any) -> None:
        if len(form) > MAX_FORMAT or wide.search(form):
            raise RenderLimit("it uses a format string that is too long or has a field that is too wide")
        self.charge(len(form) + form.count(sign) * (1000 + self._weight(values)))

    def _bounded_filter(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        at = 1 if hasattr(run, "jinja_pass_arg") else 0  # position of the value

        @functools.wraps(run)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value = args[at]
            if name in ITERATING_FILTERS and not isinstance(value, Sized):
                value = list(self._iterate(value))
                args = (*args[:at], value, *args[at + 1 :])
            if name in LAZY_FILTERS and value:  # Jinja takes what is false for an empty list
                args = (*args[:at], self._iterate(value), *args[at + 1 :])
            if isinstance(value, Sized) and name in ELEMENT_FILTERS:
                self.charge(KEY * len(value))
            rest = [*args[at + 1 :], *kwargs.values()]
            if name in NESTED_FILTERS:
                self.charge(self._weight(value))
            elif isinstance(value, Sized):
                is_text = isinstance(value, str)
                self.charge(len(value) * ((PART if name == "list" else 1) if is_text else ELEMENT))
            else:
                self.charge(1)
            if name == "replace":
                texts = [self._text(part) for part in (value, *rest[:2])]
                self.charge(texts[0].count(texts[1]) * len(texts[2]) if len(texts) == 3 else 0)
            elif name == "join" and isinstance(value, Sized):
                self.charge(len(value) * max([0, *(len(self._text(part)) for part in rest)]))
            elif name == "indent":
                widths = [len(one) if isinstance(one, str) else int(one) for one in rest]
                self.charge((self._text(value).count("\n") + 1) * max([4, *widths]))
            elif name == "format":
                self._check_format(self._text(value), _WIDE_PERCENT, "%", rest)
            elif name == "trim":
                self.charge(len(self._text(value)) * max([0, *map(len, map(self._text, rest))]) // COMPARED)
            return self._sized(run(*args, **kwargs))

        return bounded

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool | int = False,
        indent: int | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON. The parameters are those that Hugging Face gives templates; Jinja's own one is `indent`."""
        if isinstance(value, WrittenArguments):
            return str(value)
        if isinstance(ensure_ascii, int) and not isinstance(ensure_ascii, bool):
            ensure_ascii, indent = False, ensure_ascii
        if indent is not None and not 0 <= int(indent) <= MAX_INDENT:
            raise RenderLimit(f"it indents by more than {MAX_INDENT} characters")
        if separators is not None and (len(separators) != 2 or max(len(one) for one in separators) > MAX_INDENT):
            raise RenderLimit(f"it needs separators other than two strings of at most {MAX_INDENT} characters")
        longest = max((len(one) for one in separators or ()), default=0)
        # A character becomes up to two escapes of six.
        self.charge(self._weight(value) * (12 if ensure_ascii else 1) * (1 + (indent or 0) + longest))
        return json.dumps(
            value,
            ensure_ascii=bool(ensure_ascii),
            indent=indent,
            separators=None if separators is None else (separators[0], separators[1]),
            sort_keys=bool(sort_keys),
        )

    def _iterate(self, values: Iterable[Any]) -> Iterable[Any]:
        self.charge(1)
        return _CountedList(self, values) if isinstance(values, Sized) else _CountedIterable(self, values)

    def _concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self.charge(sum(map(len, parts)))
        return "".join(parts)

    def _finalize(self, value: Any) -> Any:
        return value if isinstance(value, str) else self._text(value)

    def _text(self, value: Any) -> str:
        """Return `str(value)`. Counts nested values first: one that contains itself twice doubles at each level."""
        if isinstance(value, list | tuple | dict):
            self.charge(self._weight(value))
        return str(value)

    def _size(self, value: Any) -> Any:
        """Count a new list or dictionary with all that it contains, or a string."""
        if isinstance(value, list | tuple | dict):
            self.charge(self._weight(value))
            return value
        return self._sized(value)

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str | bytes):
            self.charge(len(value))
        elif isinstance(value, list | tuple):
            self.charge(ELEMENT * len(value))
        return value

    def _weight(self, value: Any) -> int:
        """Return the characters and elements in a nested value. Counts the visit itself."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, dict):
            self.charge(len(value))
            return sum(ELEMENT + self._weight(key) + self._weight(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            total = 0
            for first in range(0, len(value), VISITED):
                part = value[first : first + VISITED]
                self.charge(len(part))
                total += sum(ELEMENT + self._weight(item) for item in part)
            return total
        return 2 * ELEMENT

    def _compared(self, value: Any) -> Any:
        """Count a value that is compared with another: all that it contains may be looked at."""
        if isinstance(value, list | tuple | dict):
            self.charge(self._weight(value))
        return value

    def _members(self, values: Any) -> Any:
        """Count the values that `in` compares one with; those of a dictionary are not compared."""
        return values if isinstance(values, dict) else self._compared(values)

    def _bounded_test(self, compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda value, other: compare(self._compared(value), other)


class _CountedIterable:
    """The values of a `for` loop; each iteration is counted."""

    def __init__(self, environment: BoundedEnvironment, values: Iterable[Any]) -> None:
        self._charge, self._values = environment.charge, values

    def __iter__(self) -> Iterator[Any]:
        charge = self._charge
        for value in self._values:
            charge(1)
            yield value


class _CountedList(_CountedIterable):
    """The same for values with a length, which `loop.length` and `loop.revindex` use."""

    _values: Any

    def __len__(self) -> int:
        return len(self._values)


class _Counting(NodeTransformer):
    """Inserts the counting filters into a syntax tree."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def _filtered(self, node: nodes.Expr, name: str) -> nodes.Filter:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "bounded_iterate")  # type: ignore[arg-type]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        operands: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        if len(operands) == 1:
            return self.generic_visit(node)
        visited = [self.visit(operand) for operand in [left, *reversed(operands)]]
        return self._filtered(nodes.List(visited, lineno=node.lineno), "bounded_sum")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            if isinstance(right, nodes.Const):
                pass  # of the template's text: a number or a string
            elif operand.op.endswith("in"):  # with or without "not"
                operand.expr = self._filtered(right, "bounded_members")
            elif not isinstance(left, nodes.Const):
                operand.expr = self._filtered(right, "bounded_compared")
            left = right
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes, lineno=node.lineno), "bounded_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(node, "bounded_size") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return self._filtered(node, "bounded_size")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return self._filtered(node, "bounded_size")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(node, "bounded_size")
