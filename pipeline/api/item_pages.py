"""Lists of items in OpenAI's API, in pages: the parameters `after`, `limit` and `order`, and the body. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from pipeline.api.json_body import to_json
from pipeline.api.query import check_names
from pipeline.errors import InvalidRequest

T = TypeVar("T")
MAX_LIMIT = 100
DEFAULT_LIMIT = 20  # both as in OpenAI's API


class Page(NamedTuple):
    """Which items are asked for."""

    after: str  # id of the item before the page; "": from the first one on
    limit: int
    is_ascending: bool


def read_page(query: Mapping[str, str]) -> Page:
    """Read the parameters. Raises `InvalidRequest`."""
    check_names(query, ("after", "limit", "order"))
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MAX_LIMIT:
        raise InvalidRequest(f"limit is {limit[:40]!r}; it must be a whole number from 1 to {MAX_LIMIT}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:40]!r}; it must be asc or desc", "order")
    return Page(query.get("after", ""), int(limit), order == "asc")


def page_of(items: Sequence[tuple[str, bytes]], page: Page) -> bytes:
    """Return the body with a page of items, given by id and JSON. Raises `InvalidRequest`."""
    shown, has_more = _cut(items, page, lambda item: item[0])
    return list_body(shown, has_more=has_more)


def page_body(items: bytes, page: Page) -> bytes:
    """Return the body with a page of `items`: JSON, an array of objects with an `id`. Raises `InvalidRequest`.

    All other values are copied: no Python objects are made of them.
    """
    shown, has_more = _cut(msgspec.json.decode(items, type=list[msgspec.Raw]), page, _id_of)
    return list_body([(_id_of(item), bytes(item)) for item in shown], has_more=has_more)


def _cut(items: Sequence[T], page: Page, id_of: Callable[[T], str]) -> tuple[Sequence[T], bool]:
    """Return the items of a page, and whether there are more. Raises `InvalidRequest`."""
    ordered = items if page.is_ascending else items[::-1]
    first = 0
    if page.after:
        first = next((index for index, item in enumerate(ordered, 1) if id_of(item) == page.after), 0)
        if not first:
            raise unknown_after(page.after)
    return ordered[first : first + page.limit], len(ordered) > first + page.limit


class _Named(msgspec.Struct):
    id: str


_named = msgspec.json.Decoder(_Named)


def _id_of(item: msgspec.Raw) -> str:
    return _named.decode(item).id


def list_body(items: Sequence[tuple[str, bytes]], *, has_more: bool) -> bytes:
    """Return the body with a list of items, given by id and JSON."""
    ids = [item_id for item_id, _ in items]
    answer: dict[str, Any] = {
        "object": "list",
        "data": [msgspec.Raw(item) for _, item in items],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
    return to_json(answer)


def unknown_after(after: str) -> InvalidRequest:
    """Return the error for an `after` that names no item."""
    return InvalidRequest(f"after is {after[:80]!r}, which is the id of no item here; give one of the list", "after")
