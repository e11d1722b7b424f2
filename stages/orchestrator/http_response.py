"""The HTTP/1.1 response of an engine or agent: its head, and where its body ends (RFC 9112); pure.

    feed(bytes) ─> the bytes of the body in them        status, fields: once the head is complete

Strict and bounded: bytes that could be read in two ways are an error.  A body has chunks or a length.  One that ends
with its connection is refused, because the connection of an engine that is killed ends, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto

MAX_HEAD_BYTES = 64 << 10  # of a head, and of the fields after the last chunk
MAX_FIELDS = 128  # of them
MAX_SIZE_BYTES = 1 << 10  # of the line with the size of a chunk

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n]*")
# A whole head as nearly all are: what it has is what the strict reading of its lines finds.
_HEAD = re.compile(
    rb"HTTP/1\.([01]) ([2-9][0-9]{2})(?: [\t -~\x80-\xff]*)?"
    rb"((?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*)*)\r\n\r\n"
)
_FIELD = re.compile(r"\r\n([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n]*)")  # in a head, behind its first line
_BLANKS = " \t"
_LENGTH = re.compile(r"[0-9]{1,15}")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?\r\n")
# In a head: a control character, or a CR or LF that is no line's end.
_FORBIDDEN = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|(?<!\r)\n")
_BODILESS = (204, 304)


class ResponseError(ValueError):
    """The bytes are no HTTP/1.1 response that is accepted."""


class Fields(Mapping[str, str]):
    """The fields of a head, by their names in upper or lower case. The values of repeated fields are joined."""

    __slots__ = ("_names", "_values")

    def __init__(self, fields: Iterable[tuple[str, str]] = ()) -> None:
        """`fields`: names and values, which may be surrounded by blanks."""
        names: dict[str, str] = {}  # as they were sent, by lower-case name
        values: dict[str, str] = {}
        for name, value in fields:
            key = name.lower()
            if key in values:
                values[key] += f", {value.strip(_BLANKS)}"
            else:
                names[key], values[key] = name, value.strip(_BLANKS)
        self._names, self._values = names, values

    def find(self, key: str) -> str | None:
        """The value of a field by its lower-case name."""
        return self._values.get(key)

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def __len__(self) -> int:
        return len(self._values)


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()  # in a body of known length
    SIZE = auto()  # at the line with the size of a chunk
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    ENDED = auto()


_AT_SIZE = _State.SIZE


class ResponseReader:
    """One response to a request of `method`, without interim responses."""

    def __init__(self, method: str) -> None:
        self.status = 0  # 0: the head is not complete
        self.fields = Fields()
        self.keeps_connection = False  # another request may follow after its end
        self._has_body = method != "HEAD"
        self._state = _State.HEAD
        self._rest = b""  # received, and not a complete head or line
        self._left = 0  # bytes of the chunk, or of the body
        self._trailer_bytes = 0

    @property
    def has_ended(self) -> bool:
        """Whether the response is complete."""
        return self._state is _State.ENDED

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`. Raises `ResponseError`; then the connection is of no more use."""
        if chunk := self.whole_chunk(data):
            return chunk
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        if self._state is _State.HEAD:
            at = self._read_head(data)
        if self._state is _State.LENGTH:
            body = data[at : at + self._left]
            at += len(body)
            self._left -= len(body)
            if not self._left:
                self._state = _State.ENDED
        elif self._state is _State.HEAD or self._state is _State.ENDED:
            body = b""
        else:
            at, body = self._read_chunks(data, at)
        if at < len(data):
            if self._state is _State.ENDED:
                self.keeps_connection = False  # what follows was not asked for
            else:
                self._rest = data[at:]
        return body

    def whole_chunk(self, data: bytes) -> bytes:
        """The body if `data` is one chunk, as an event comes; b"": `feed` reads it."""
        if self._state is _AT_SIZE and not self._rest:
            line = _SIZE.match(data)
            if line is not None and line.end() <= MAX_SIZE_BYTES:
                begin, end = line.end(), len(data) - 2
                if int(line[1], 16) == end - begin > 0 and data.endswith(b"\r\n"):
                    return data[begin:end]
        return b""

    # ---------------------------------------------------------------- head

    def _read_head(self, data: bytes) -> int:
        """Where the body begins. While the head is not complete, where it begins."""
        at = 0
        if (usual := _HEAD.match(data, 0, MAX_HEAD_BYTES)) is not None:
            found = _FIELD.findall(usual[3].decode("utf-8", "surrogateescape"))
            if len(found) <= MAX_FIELDS:
                self._begin(int(usual[2]), usual[1] == b"1", Fields(found))
                return usual.end()
        while True:
            end = data.find(b"\r\n\r\n", at)
            if (end if end >= 0 else len(data) - 3) - at > MAX_HEAD_BYTES:
                raise ResponseError(f"the head of a response has more than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                if not b"HTTP/1.".startswith(data[at : at + 7]):
                    raise ResponseError(f"no HTTP response: {data[at : at + 40]!r}")
                # Lines that end with LF alone would be waited for for ever. The LF of a last CR may follow.
                if _FORBIDDEN.search(data, at, len(data) - data.endswith(b"\r")) is not None:
                    raise ResponseError(f"no HTTP response: {data[at : at + 40]!r}")
                return at
            status, is_1_1, fields = _parse_head(data[at:end])
            at = end + 4
            if status >= 200:
                break
            if status == 101:
                raise ResponseError("a response switches the protocol, which was not asked for")
        self._begin(status, is_1_1, fields)
        return at

    def _begin(self, status: int, is_1_1: bool, fields: Fields) -> None:
        self.status, self.fields = status, fields
        connection = fields.find("connection")
        self.keeps_connection = is_1_1 and (connection is None or "close" not in _tokens(connection))
        self._choose_framing(is_1_1)

    def _choose_framing(self, is_1_1: bool) -> None:
        coding, length = self.fields.find("transfer-encoding"), self.fields.find("content-length")
        if coding is not None:
            if length is not None:
                raise ResponseError("a response has both Transfer-Encoding and Content-Length")
            if coding.lower() != "chunked" or not is_1_1:
                raise ResponseError(f"a response has the Transfer-Encoding {coding[:40]!r}")
            self._state = _State.SIZE
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise ResponseError(f"a response has the Content-Length {length[:40]!r}")
            self._left = int(length)
            self._state = _State.LENGTH if self._left else _State.ENDED
        elif self._has_body and self.status not in _BODILESS:
            raise ResponseError("a response has neither Content-Length nor chunks")
        if not self._has_body or self.status in _BODILESS:
            self._state = _State.ENDED

    # ---------------------------------------------------------------- chunks

    def _read_chunks(self, data: bytes, at: int) -> tuple[int, bytes]:
        """How far `data` was read, and the bytes of the chunks."""
        parts = []
        state = self._state
        while True:
            if state is _State.CHUNK:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
                state = _State.CHUNK_END
            if state is _State.CHUNK_END:
                end = data[at : at + 2]
                if end != b"\r\n":
                    if not b"\r\n".startswith(end):
                        raise ResponseError("a chunk is longer than its size")
                    break
                at += 2
                state = _State.SIZE
            if state is _State.SIZE:
                line = _SIZE.match(data, at)
                if line is None or line.end() - at > MAX_SIZE_BYTES:
                    if line is not None or data.find(b"\n", at) >= 0 or len(data) - at > MAX_SIZE_BYTES:
                        raise ResponseError(f"no size of a chunk: {data[at : at + 40]!r}")
                    break
                self._left, at = int(line[1], 16), line.end()
                state = _State.CHUNK if self._left else _State.TRAILER
                continue
            at, has_ended = self._read_trailer(data, at)
            state = _State.ENDED if has_ended else _State.TRAILER
            break
        self._state = state
        return at, parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_trailer(self, data: bytes, at: int) -> tuple[int, bool]:
        """Drop the fields after the last chunk: how far `data` was read, and whether they have ended."""
        while True:
            end = data.find(b"\r\n", at)
            if self._trailer_bytes + (end if end >= 0 else len(data) - 1) - at > MAX_HEAD_BYTES:
                raise ResponseError(f"the fields after the last chunk have more than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                return at, False
            if end == at:
                return end + 2, True
            if _FORBIDDEN.search(data, at, end) is not None:
                raise ResponseError(f"no field of a response: {data[at:end][:40]!r}")
            _check_field(data[at:end])
            self._trailer_bytes += end + 2 - at
            at = end + 2


def _parse_head(head: bytes) -> tuple[int, bool, Fields]:
    """Status, whether the version is 1.1, and fields of a head without its last empty line."""
    first, *lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None or _FORBIDDEN.search(head) is not None:
        raise ResponseError(f"no HTTP response: {head[:40]!r}")
    if len(lines) > MAX_FIELDS:
        raise ResponseError(f"the head of a response has more than {MAX_FIELDS} fields")
    found = _FIELD.findall(head[len(first) :].decode("utf-8", "surrogateescape"))
    if len(found) != len(lines):
        for line in lines:
            _check_field(line)
    return int(status[2]), status[1] == b"1", Fields(found)


def _check_field(line: bytes) -> None:
    if _LINE.fullmatch(line) is None:
        raise ResponseError(f"no field of a response: {line[:40]!r}")


def _tokens(value: str) -> list[str]:
    return [one.strip(" \t").lower() for one in value.split(",")]
