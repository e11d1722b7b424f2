"""Where an HTTP/1.1 response begins and ends (RFC 9112, section 6); pure.

    feed(bytes) ─> body bytes, without chunk sizes        head: status line and fields, once it is complete

A body ends after its last chunk, after Content-Length bytes, or with the connection.
"""

from __future__ import annotations

import http.client
import io
from enum import Enum, auto

MAX_HEAD = 64 << 10  # bytes of a head, of a chunk size or of the trailer fields; longer ones are no HTTP
MAX_CHUNK_LINE = 1 << 10


class _State(Enum):
    HEAD = auto()
    SIZE = auto()  # of a chunk
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    LENGTH = auto()
    UNTIL_CLOSE = auto()
    ENDED = auto()


class ResponseReader:
    """One response. Methods raise `ValueError` for bytes that are no HTTP response."""

    def __init__(self) -> None:
        self.status = 0  # 0: the head is not complete
        self.headers: http.client.HTTPMessage = http.client.HTTPMessage()
        self._state = _State.HEAD
        self._rest = b""  # received, and not yet a complete line
        self._left = 0  # bytes of the chunk or of the body

    @property
    def has_ended(self) -> bool:
        """Whether the whole response has been received."""
        return self._state is _State.ENDED

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow on this connection."""
        return self.has_ended and not self._rest and "close" not in (self.headers.get("Connection") or "").lower()

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`."""
        if self._state is _State.CHUNK and len(data) <= self._left:
            self._left -= len(data)
            if not self._left:
                self._state = _State.CHUNK_END
            return data
        buffer = self._rest + data if self._rest else data
        self._rest = b""
        if self._state is _State.HEAD:
            buffer = self._read_head(buffer)
            if not self.status:
                return b""
        if self._state is _State.UNTIL_CLOSE:
            return buffer
        if self._state is _State.LENGTH:
            taken = buffer[: self._left]
            self._left -= len(taken)
            self._rest = buffer[len(taken) :]
            if not self._left:
                self._state = _State.ENDED
            return taken
        return self._read_chunks(buffer)

    def end(self) -> bool:
        """The connection has been closed. Returns whether the response is complete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.ENDED
        return self.has_ended

    def _read_head(self, buffer: bytes) -> bytes:
        while self._state is _State.HEAD:
            head, found, body = buffer.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1."[: len(head)]) or len(head) > MAX_HEAD:
                raise ValueError(f"no HTTP response: {head[:60]!r}")
            if not found:
                self._rest = buffer
                return b""
            status_line, _, fields = head.partition(b"\r\n")
            words = status_line.split(None, 2)
            if len(words) < 2 or not words[1].isdigit():
                raise ValueError(f"no HTTP response: {status_line[:60]!r}")
            buffer = body
            if words[1].startswith(b"1"):  # an interim response
                continue
            self.status = int(words[1])
            self.headers = http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n"))
            self._choose_framing(words[0])
        return buffer

    def _choose_framing(self, version: bytes) -> None:
        length = self.headers.get("Content-Length")
        if (self.headers.get("Transfer-Encoding") or "").lower().endswith("chunked"):
            self._state = _State.SIZE
        elif self.status in (204, 304):
            self._state = _State.ENDED
        elif length is not None:
            if not length.strip().isdigit():
                raise ValueError(f"Content-Length {length!r}")
            self._left = int(length)
            self._state = _State.LENGTH if self._left else _State.ENDED
        else:
            self._state = _State.UNTIL_CLOSE
        if version == b"HTTP/1.0" and "Connection" not in self.headers:
            self.headers["Connection"] = "close"

    def _read_chunks(self, buffer: bytes) -> bytes:
        at, body = 0, []
        while self._state is not _State.ENDED:
            if self._state is _State.CHUNK:
                piece = buffer[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._state = _State.CHUNK_END
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > MAX_CHUNK_LINE:
                    raise ValueError("a chunk without a size")
                break
            line, at = buffer[at:end], end + 2
            match self._state:
                case _State.CHUNK_END if line:
                    raise ValueError("a chunk that is longer than its size")
                case _State.CHUNK_END:
                    self._state = _State.SIZE
                case _State.SIZE:
                    self._left = int(line.split(b";")[0], 16)
                    self._state = _State.CHUNK if self._left else _State.TRAILER
                case _State.TRAILER if not line:
                    self._state = _State.ENDED
        self._rest = buffer[at:]
        return b"".join(body)
