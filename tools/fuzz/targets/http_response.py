"""Responses of engines and agents, as the orchestrator receives them.

byte 0   how many bytes arrive at once, 0: all; its highest bit: the request was HEAD
"""

from __future__ import annotations

from collections.abc import Iterator

from stages.orchestrator.http_response import ResponseError, ResponseReader
from tools.fuzz.target import Target


def run(data: bytes) -> None:
    """Read a response in parts."""
    selector, response = data[:1] or b"\0", data[1:]
    size, method = selector[0] & 127, "HEAD" if selector[0] & 128 else "GET"
    parts = [response[at : at + size] for at in range(0, len(response), size)] if size else [response]
    reader, n_bytes = ResponseReader(method), 0
    for part in parts:
        n_bytes += len(reader.feed(part))
    assert n_bytes <= len(response)
    for name, value in reader.fields.items():
        assert not {"\r", "\n", "\0"} & {*name, *value}, f"a field has a line break: {name!r}: {value!r}"
    assert reader.status or not (reader.has_ended or reader.keeps_connection or n_bytes)


def seeds() -> Iterator[bytes]:
    """Each kind of framing, with what may precede and follow it."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    chunks = b"c\r\ndata: a\nid: 1\r\n3;x=y\r\n\n\n\n\r\n0\r\nX-Sum: 1\r\n\r\n"
    for selector in (0, 1, 7):
        yield bytes([selector]) + head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
        yield bytes([selector]) + b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"Content-Length: 5\r\n\r\nhello"
    yield bytes([128]) + head + b"Content-Length: 5\r\n\r\n"
    yield bytes([0]) + b"HTTP/1.0 503 \r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    yield bytes([0]) + b"HTTP/1.1 204 No Content\r\n\r\n"


TARGET = Target(
    run,
    seeds,
    errors=(ResponseError,),
    modules=("stages.orchestrator.http_response",),
)
