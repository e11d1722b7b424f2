"""Server-sent events of a response, as the HTML standard defines them (section 9.2.6); pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class Event(NamedTuple):
    """One event. `id` is that of the last event that had one."""

    data: str
    id: str


def read_events(readline: Callable[[], bytes]) -> Iterator[Event]:
    """Events until the end of the body. An event whose final empty line is missing does not count."""
    data: list[str] = []
    where = ""
    while (line := readline()).endswith(b"\n"):
        text = line.decode("utf-8").rstrip("\r\n")
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if not text:
            if data:
                yield Event("\n".join(data), where)
            data = []
        elif name == "data":
            data.append(value)
        elif name == "id":
            where = value
