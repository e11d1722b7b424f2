"""Reads the bytes of a plain request for text: what nearly every client sends.

Plain is a POST in HTTP/1.1 to a path for text whose head has no field twice, and a body of known length.  Whatever else
there is in HTTP is left to aiohttp, so that nothing is read here that could be read in two ways.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

MAX_HEAD_BYTES = 8 << 10  # as aiohttp's of a line
MAX_FIELDS = 64
MAX_BODY_BYTES = 256 << 10

_HEAD = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)+)\r\n")
_FIELD = re.compile(r"([^:]+):[ \t]*([^\r]*)\r\n")
_LENGTH = re.compile("[1-9][0-9]{0,6}")
# Fields with which a request is more than its body.
# And those that aiohttp refuses, or reads as `Connection`.
_OTHERS = frozenset(
    ("transfer-encoding", "expect", "upgrade", "te", "trailer", "proxy-connection", "sec-websocket-key1")
)


class Head(NamedTuple):
    """The head of a plain request."""

    path: str
    fields: list[tuple[str, str]]  # names as they were sent
    n_head: int  # bytes
    n_body: int


def read_head(data: bytes, paths: Collection[str]) -> Head | None:
    """The head at the beginning of `data`; None unless it is complete, and of a plain request for one of `paths`."""
    match = _HEAD.match(data, 0, MAX_HEAD_BYTES)
    if match is None:
        return None
    path = match[1].decode("ascii")
    if path not in paths:
        return None
    fields = [
        (name, value.rstrip(" \t")) for name, value in _FIELD.findall(match[2].decode("utf-8", "surrogateescape"))
    ]
    by_name = {name.lower(): value for name, value in fields}
    length = by_name.get("content-length", "")
    if (
        len(by_name) != len(fields)
        or len(fields) > MAX_FIELDS
        or not _OTHERS.isdisjoint(by_name)
        or "host" not in by_name
        or by_name.get("connection", "keep-alive").lower() != "keep-alive"
        or _LENGTH.fullmatch(length) is None
        or int(length) > MAX_BODY_BYTES
    ):
        return None
    return Head(path, fields, match.end(), int(length))
