"""Comparisons, searches and cuts in a template: operations that select text, in which marks do not count.

Text is compared and searched without its marks (template_marks.py), whether a message or the template itself has
written it: if `</think>` is a control token, `'</think>' in content` is true for both.  What is cut out keeps its
marks: marked text has as many characters as without marks, so that places found in one are places in the other.  Only
the new text of `replace` is written, as the template has marked it.

Therefore no operation gives marks to text of a message.  If a template removes a name from a message and writes it
again, as with `split` and `join`, the one that it writes is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import BuiltinMethodType
from typing import Any

from jinja2.runtime import Context
from markupsafe import Markup

from stages.tokenizer.template_budget import COMPARED, BoundedEnvironment
from stages.tokenizer.template_marks import TemplateMarks
from stages.tokenizer.template_names import COMPARING_TESTS, SELECTING_METHODS

_AFTER_PREFIX = frozenset({"lstrip", "removeprefix"})


class MarkedEnvironment(BoundedEnvironment):
    """A sandbox whose selecting operations ignore marks. `marks`: of the template's control tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = TemplateMarks({})
        self.filters |= {"compared_text": self._plain, "compared_members": self._plain_members}
        self.filters |= {name: self._selecting_filter(name, self.filters[name]) for name in ("replace", "trim")}
        self.tests |= {name: self._selecting_test(name, self._plain) for name in COMPARING_TESTS}
        self.tests["in"] = self._selecting_test("in", self._plain_members)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """As of the base class. Methods that select ignore marks."""
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(method, BuiltinMethodType) and method.__name__ in SELECTING_METHODS:
            owner = method.__self__
            given = (value for name, value in kwargs.items() if not name.startswith("_"))
            if isinstance(owner, str | list | tuple) and __self._has_marks((owner, *args, *given)):
                return __self._select(owner, method.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _select(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a method of a built-in type, and run it."""
        self.charge(1)
        plain = self._plain(owner)
        is_written = name == "replace"
        args = tuple(arg if is_written and at == 1 else self._plain(arg) for at, arg in enumerate(args))
        # Within loops and blocks Jinja passes their variables, too.
        kwargs = {key: self._plain(arg) for key, arg in kwargs.items() if not key.startswith("_")}
        method = getattr(plain, name)
        self._check_method(method, args, kwargs)
        is_marked = isinstance(owner, str) and self._has_marks(owner)
        return self._sized(cut(owner, plain, name, args, kwargs) if is_marked else method(*args, **kwargs))

    def _selecting_filter(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        is_replace = name == "replace"
        method = "replace" if is_replace else "strip"

        def selecting(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if is_replace else args  # Jinja's filter gets its evaluation context first
            if not self._has_marks((*given, *kwargs.values())):
                return run(*args, **kwargs)
            value, rest = _arguments(name, *given, **kwargs)
            if isinstance(value, Markup) and not is_replace:
                return run(*args, **kwargs)
            return self._select(self._text(value), method, rest, {})

        if is_replace:
            selecting.jinja_pass_arg = run.jinja_pass_arg  # type: ignore[attr-defined]
        return selecting

    def _selecting_test(self, name: str, plain: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        run: Any = self.tests[name]
        return lambda value, other: run(self._plain(value), plain(other))

    # -------------------------------------------------------------- marks

    def _has_marks(self, value: Any) -> bool:
        if isinstance(value, str):
            return not value.isascii() and self.marks.are_in(self._counted(value))
        return isinstance(value, list | tuple) and any(map(self._has_marks, value))

    def _counted(self, text: str) -> str:
        self.charge(len(text) * (1 + self.marks.n_ends // COMPARED))
        return text

    def _plain(self, value: Any) -> Any:
        """Return a text, or a value that contains texts, without marks."""
        if isinstance(value, str):
            return value if value.isascii() else self.marks.plain(self._counted(value))
        if isinstance(value, list | tuple):
            self.charge(len(value))
            return type(value)(map(self._plain, value)) if type(value) in (list, tuple) else value
        if isinstance(value, dict):
            self.charge(len(value))
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        return value

    def _plain_members(self, value: Any) -> Any:
        """As `_plain`, for the values that `in` looks among: keys of a dictionary, values of a generator."""
        if isinstance(value, dict):
            return dict.fromkeys(map(self._plain, value))
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | list | tuple | range):
            return map(self._plain, value)
        return self._plain(value)


def _arguments(name: str, value: Any, *rest: Any, **named: Any) -> tuple[Any, tuple[Any, ...]]:
    """The value of a filter, and the arguments of the method of `str` that does the same. Raises `TypeError`."""
    if name == "trim":
        (chars,) = (*rest, *named.values()) or (None,)
        return value, (chars,)
    order = ("old", "new", "count")
    given = dict(zip(order, rest, strict=False)) | named
    count = given.get("count")
    return value, (str(given["old"]), str(given["new"]), -1 if count is None else count)


def cut(text: str, plain: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the method `name` gives for `text`, whose places are found in `plain`, of the same length."""
    if name == "replace":
        old, new, count = (*args, kwargs.get("count", -1))[:3]
        if not old:
            return text.replace(old, new, count)
        return new.join(_slices(text, plain, plain.split(old, count), len(old)))
    found = getattr(plain, name)(*args, **kwargs)
    if isinstance(found, str):
        begin = len(plain) - len(found) if name in _AFTER_PREFIX else 0
        if name == "strip":
            begin = len(plain) - len(plain.lstrip(*args))
        return text[begin : begin + len(found)]
    if isinstance(found, tuple):
        return tuple(_slices(text, plain, found, 0))
    if isinstance(found, list):
        separator = kwargs.get("sep", args[0] if args else None) if name != "splitlines" else None
        return _slices(text, plain, found, None if separator is None else len(separator))
    return found  # a number, or whether something is so


def _slices(text: str, plain: str, parts: Iterable[str], gap: int | None) -> list[str]:
    """The parts of `plain` in `text`; `gap`: characters between two of them, None: unknown whitespace."""
    found, at = [], 0
    for part in parts:
        at = plain.index(part, at) if gap is None else at
        found.append(text[at : at + len(part)])
        at += len(part) + (gap or 0)
    return found
