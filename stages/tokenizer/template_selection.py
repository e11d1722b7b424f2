"""Comparisons, searches and cuts in a template: operations that select text, in which marks do not count.

Text is compared and searched without its marks (template_marks.py), whether a message or the template itself has
written it: if `</think>` is a control token, `'</think>' in content` is true for both.  What is cut out keeps its
marks: marked text has as many characters as without marks, so that places found in one are places in the other.  Only
the new text of `replace` is written, as the template has marked it.

Therefore no operation gives marks to text of a message.  If a template removes a name from a message and writes it
again, as with `split` and `join`, the one that it writes is its own.
"""

from __future__ import annotations

import gc
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinMethodType
from typing import Any

from jinja2.runtime import Context

from stages.tokenizer.template_budget import COMPARED, ELEMENT, PART, VISITED, BoundedEnvironment
from stages.tokenizer.template_marks import TemplateMarks
from stages.tokenizer.template_names import COMPARING_OPERATORS, COMPARING_TESTS, SELECTING_METHODS

_AFTER_PREFIX = frozenset({"lstrip", "removeprefix"})
_CONTAINERS = (list, tuple, dict)
_KEYS: type = type({}.keys())
_FEW_KEYS = 64  # of a mapping whose keys are looked through each time
_MAX_KNOWN = 64  # larger mappings that a rendering remembers, which keeps them in memory


class _Known(threading.local):
    """Mappings of this thread's rendering whose keys have no marks, by their `id`: a template changes no mapping."""

    def __init__(self) -> None:
        self.mappings: dict[int, Any] = {}


class MarkedEnvironment(BoundedEnvironment):
    """A sandbox whose selecting operations ignore marks. `marks`: of the template's control tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = TemplateMarks({})
        self._known = _Known()
        self.filters |= {
            "compared_plain": self._plain,
            "compared_text": self._plain_text,
            "compared_members": self._plain_members,
            "compared_values": self._compare,
        }
        self.filters |= {name: self._selecting_filter(name, self.filters[name]) for name in ("replace", "trim")}
        self.tests |= {name: self._selecting_test(name, self._operands) for name in COMPARING_TESTS}
        self.tests["in"] = self._selecting_test(
            "in", lambda value, members: (self._plain(value), self._plain_members(members))
        )

    def start(self) -> None:
        """As of the base class."""
        super().start()
        self._known.mappings.clear()

    def stop(self) -> None:
        """As of the base class."""
        super().stop()
        self._known.mappings.clear()

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
        return self._sized(cut(owner, plain, name, args, kwargs, self.charge) if is_marked else method(*args, **kwargs))

    def _selecting_filter(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        is_replace = name == "replace"
        method = "replace" if is_replace else "strip"

        def selecting(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if is_replace else args  # Jinja's filter gets its evaluation context first
            if not self._has_marks((*given, *kwargs.values())):
                return run(*args, **kwargs)
            value, rest = _arguments(name, *given, **kwargs)
            if hasattr(value, "__html__") and not is_replace:
                return run(*args, **kwargs)
            return self._select(self._text(value), method, rest, {})

        if is_replace:
            selecting.jinja_pass_arg = run.jinja_pass_arg  # type: ignore[attr-defined]
        return selecting

    def _selecting_test(self, name: str, operands: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
        run: Any = self.tests[name]
        return lambda value, other: run(*operands(value, other))

    def _compare(self, value: Any, name: str, other: Any) -> Any:
        return COMPARING_OPERATORS[name](*self._operands(value, other))

    def _operands(self, value: Any, other: Any) -> tuple[Any, Any]:
        """Return two values to compare. A list or a mapping is visited only beside another one."""
        plain = self._plain if isinstance(value, _CONTAINERS) and isinstance(other, _CONTAINERS) else self._plain_text
        return plain(value), plain(other)

    # -------------------------------------------------------------- marks

    def _has_marks(self, value: Any) -> bool:
        if isinstance(value, str):
            return not value.isascii() and self.marks.are_in(self._counted(value))
        if not isinstance(value, list | tuple):
            return False
        return any(not _are_ascii(part) and any(map(self._has_marks, part)) for part in self._parts(value))

    def _counted(self, text: str) -> str:
        self.charge(len(text) * (1 + self.marks.n_ends // COMPARED))
        return text

    def _parts(self, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Count the visit of a list, part by part."""
        for first in range(0, len(values), VISITED):
            part = values[first : first + VISITED]
            self.charge(len(part))
            yield part

    def _plain_text(self, value: Any) -> Any:
        """Return a text without marks, any other value as it is."""
        return self.marks.plain(self._counted(value)) if isinstance(value, str) and not value.isascii() else value

    def _plain(self, value: Any) -> Any:
        """Return a text, or a value that contains texts, without marks: the value itself if it has none."""
        if isinstance(value, dict):
            keys, items = list(value), list(value.values())
            plain_keys, plain_items = self._plain(keys), self._plain(items)
            return value if plain_keys is keys and plain_items is items else dict(zip(plain_keys, plain_items))
        if type(value) not in (list, tuple):
            return self._plain_text(value)
        made: list[Any] | None = None
        n_visited = 0
        for part in self._parts(value):
            plain = part if _are_ascii(part) else list(map(self._plain, part))
            if made is None and any(map(operator.is_not, plain, part)):
                self.charge(ELEMENT * len(value))
                made = list(value[:n_visited])
            if made is not None:
                made += plain
            n_visited += len(part)
        return value if made is None else type(value)(made)

    def _plain_members(self, value: Any) -> Any:
        """As `_plain`, for the values that `in` looks among: keys of a mapping, values of a generator."""
        if type(value) is _KEYS:
            (value,) = gc.get_referents(value)  # the mapping, in which a key is found as in the view
        if isinstance(value, dict):
            return self._plain_keys(value)
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | list | tuple | range):
            return map(self._plain, self._iterate(value))
        return self._plain(value)

    def _plain_keys(self, mapping: dict[Any, Any]) -> dict[Any, Any]:
        """Return a mapping with the same keys without marks: as a rule, `mapping` itself.

        The keys of a large mapping are looked through once in a rendering, and not in each test of a loop.
        """
        known = self._known.mappings
        if id(mapping) in known or (len(mapping) <= _FEW_KEYS and _are_ascii(mapping)):
            return mapping
        keys = list(mapping)
        plain = self._plain(keys)
        if plain is not keys:  # written by the template: messages have no marks
            return dict.fromkeys(plain)
        if len(keys) > _FEW_KEYS:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            known[id(mapping)] = mapping
        return mapping


def _are_ascii(values: Iterable[Any]) -> bool:
    """Whether all values are texts without marks; False may be wrong."""
    try:
        return all(map(str.isascii, values))
    except TypeError:  # one is no text
        return False


def _arguments(name: str, value: Any, *rest: Any, **named: Any) -> tuple[Any, tuple[Any, ...]]:
    """The value of a filter, and the arguments of the method of `str` that does the same. Raises `TypeError`."""
    if name == "trim":
        (chars,) = (*rest, *named.values()) or (None,)
        return value, (chars,)
    order = ("old", "new", "count")
    given = dict(zip(order, rest, strict=False)) | named
    count = given.get("count")
    return value, (str(given["old"]), str(given["new"]), -1 if count is None else count)


def cut(
    text: str, plain: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], charge: Callable[[int], None]
) -> Any:
    """Return what the method `name` gives for `text`, whose places are found in `plain`, of the same length.

    charge: called with a number of characters or elements, before an operation that takes as much more.
    """
    if name == "replace":
        old, new, count = (*args, kwargs.get("count", -1))[:3]
        if not old:
            return text.replace(old, new, count)
        return _replaced(text, plain, old, new, count, charge)
    found = getattr(plain, name)(*args, **kwargs)
    if isinstance(found, str):
        begin = len(plain) - len(found) if name in _AFTER_PREFIX else 0
        if name == "strip":
            begin = len(plain) - len(plain.lstrip(*args))
        return text[begin : begin + len(found)]
    if isinstance(found, tuple):
        return tuple(_slices(text, plain, found, 0))
    if isinstance(found, list):
        charge(PART * len(found))  # the slices are a second list
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


def _replaced(text: str, plain: str, old: str, new: str, count: int, charge: Callable[[int], None]) -> str:
    """Return `text` with `new` at the places where `old`, which is not empty, is in `plain`.

    Only a part of the slices is in memory at a time, for a slice may take fifty times the memory of its character.
    """
    plain[:0].replace(old, new, count)  # raises what it raises
    done: list[str] = []
    slices: list[str] = []
    at = 0
    while count and (found := plain.find(old, at)) >= 0:
        slices += (text[at:found], new)
        at = found + len(old)
        count -= 1
        if len(slices) >= VISITED:
            charge(len(slices))
            done.append("".join(slices))
            slices = []
    return "".join([*done, *slices, text[at:]])
