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
MAX_KEPT_BYTES = 2 << 10  # of a head that is compared with the next one of its connection
_ZERO = ord("0")

_HEAD = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)+)\r\n")
_FIELD = re.compile(r"([^:]+):[ \t]*([^\r]*)\r\n")
_LENGTH = re.compile("[1-9][0-9]{0,6}")
# Fields with which a request is more than its body.
# And those that aiohttp refuses, or reads as `Connection`.
_OTHERS = frozenset(
    ("transfer-encoding", "expect", "upgrade", "te", "trailer", "proxy-connection", "sec-websocket-key1")
)


# In a head that has it once, behind its first line.
_LENGTH_FIELD = re.compile(rb"\r\n[Cc][Oo][Nn][Tt][Ee][Nn][Tt]-[Ll][Ee][Nn][Gg][Tt][Hh]:[ \t]*([0-9]+)")


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


class HeadReader:
    """Reads the heads of one connection, whose client sends nearly the same one again: only the length differs."""

    def __init__(self, paths: Collection[str]) -> None:
        """`paths`: for text."""
        self.number = 0  # of the last head; the same for heads that differ in the length alone
        self.is_kept = False  # the last head is compared with the next one
        self._paths = paths
        self._last: Head | None = None
        self._begin = self._end = b""  # of the last head, up to its Content-Length and behind that

    def read(self, data: bytes) -> Head | None:
        """As `read_head`."""
        if self._last is not None and data.startswith(self._begin):
            at = len(self._begin)
            end = data.find(b"\r", at, at + 8)
            if end > at and data.startswith(self._end, end):
                n_head, digits = end + len(self._end), data[at:end]
                if digits.isdigit() and digits[0] != _ZERO and n_head <= MAX_HEAD_BYTES:
                    return self._of_length(self._last, digits, n_head) if int(digits) <= MAX_BODY_BYTES else None
        head = read_head(data, self._paths)
        if head is not None:
            self.number += 1
            field = _LENGTH_FIELD.search(data, 0, head.n_head)
            self._last, self.is_kept = None, field is not None and head.n_head <= MAX_KEPT_BYTES
            if self.is_kept and field is not None:
                self._last, self._begin, self._end = head, data[: field.start(1)], data[field.end(1) : head.n_head]
        return head

    def _of_length(self, known: Head, digits: bytes, n_head: int) -> Head:
        """The head as the last one, with another length."""
        n_body, given = int(digits), digits.decode()
        if n_body != known.n_body:
            fields = [(name, given if name.lower() == "content-length" else value) for name, value in known.fields]
            known = self._last = Head(known.path, fields, n_head, n_body)
        return known
