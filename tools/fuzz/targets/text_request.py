"""Requests of clients, as the orchestrator reads them without aiohttp: aiohttp must read the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser

from stages.orchestrator.text_request import HeadReader, read_head
from tools.fuzz.target import Target

PATH = "/v1/generate"


def run(data: bytes) -> None:
    """Read a request, and compare it with what aiohttp reads. Behind another one it is read the same."""
    head, reader = read_head(data, (PATH,)), HeadReader((PATH,))
    for begin, end in ((b"", b""), (b"Content-Length: 7", b"Content-Length: 2")):
        reader.read(data.replace(end, begin) if end else data)
        assert reader.read(data) == head, "a head is read in another way behind another one"
    if head is not None:
        for name, value in head.fields:
            assert not {"\r", "\n", "\0"} & {*name, *value}, f"a field has a line break: {name!r}: {value!r}"
        asyncio.run(_compare(data[: head.n_head] + b"x" * head.n_body, head.n_head))


async def _compare(data: bytes, n_head: int) -> None:
    head = read_head(data, (PATH,))
    assert head is not None and head.n_head == n_head
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 20, max_line_size=8190, max_field_size=8190)
    messages, *_ = parser.feed_data(data)
    ((message, payload),) = messages
    found = [(name.lower(), value) for name, value in message.headers.items()]
    assert found == [(name.lower(), value) for name, value in head.fields]
    assert (message.method, message.path, message.should_close) == ("POST", PATH, False)
    assert payload.is_eof() and len(payload.read_nowait()) == head.n_body


def seeds() -> Iterator[bytes]:
    """A plain request, and others that are none."""
    begin = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
    yield begin + b"Content-Length: 2\r\n\r\n{}"
    yield begin + b"Connection: keep-alive\r\nX-Request-Id: \xc3\xa9 \r\nContent-Length: 12\r\n\r\n"
    yield begin + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
    yield begin + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    yield begin + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"
    yield begin + b"A: b\r\n c\r\nContent-Length: 02\r\n\r\n{}"


TARGET = Target(
    run,
    seeds,
    errors=(),
    modules=("stages.orchestrator.text_request",),
)
