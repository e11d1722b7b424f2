"""Filters and methods that chat templates may use, by what they cost (`template_budget.py`)."""

from __future__ import annotations

import operator

FILTERS = [
    "abs",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "string",
    "title",
    "trim",
    "unique",
    "upper",
    "wordcount",
]

# They look at all that their value contains.
NESTED_FILTERS = frozenset({"string", "join", "format", "safe", "e", "escape", "sort", "unique", "dictsort"})
METHODS = {
    str: frozenset(
        {
            "capitalize",
            "casefold",
            "center",
            "count",
            "encode",
            "endswith",
            "expandtabs",
            "find",
            "format",
            "format_map",
            "index",
            "isalnum",
            "isalpha",
            "isascii",
            "isdecimal",
            "isdigit",
            "isidentifier",
            "islower",
            "isnumeric",
            "isprintable",
            "isspace",
            "istitle",
            "isupper",
            "join",
            "ljust",
            "lower",
            "lstrip",
            "partition",
            "removeprefix",
            "removesuffix",
            "replace",
            "rfind",
            "rindex",
            "rjust",
            "rpartition",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
            "startswith",
            "strip",
            "swapcase",
            "title",
            "upper",
            "zfill",
        }
    ),
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
}
# They take from a text, or find in it, what their arguments name: marks do not count (template_selection.py).
SELECTING_METHODS = frozenset(
    name for name in METHODS[str] if name.startswith(("is", "find", "index", "count", "ends", "starts", "partition"))
) | {
    "lstrip",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "strip",
}
# They run Python code for each element or character of their value, and cannot be stopped before its end.
ELEMENT_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "title", "unique", "wordcount"})
# They take a value apart that may be a generator.
ITERATING_FILTERS = frozenset({"dictsort", "groupby", "join", "list", "max", "min", "sort", "unique"})
# They return a generator.
LAZY_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
# They make a string for each part, which takes more memory than its characters.
SPLIT_METHODS = frozenset({"rsplit", "split", "splitlines"})
# Python searches from the right, and strips characters of a set, in a time of the product of both lengths.
PRODUCT_METHODS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
# They compare their value with the argument.
COMPARING_TESTS = {
    **dict.fromkeys(("==", "eq", "equalto"), operator.eq),
    **dict.fromkeys(("!=", "ne"), operator.ne),
    **dict.fromkeys((">", "gt", "greaterthan"), operator.gt),
    **dict.fromkeys(("<", "lt", "lessthan"), operator.lt),
    ">=": operator.ge,
    "ge": operator.ge,
    "<=": operator.le,
    "le": operator.le,
}
# The operators between two values that are compared, as Jinja's syntax trees name them.
COMPARING_OPERATORS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}
