"""A client on a raw socket: sends several requests at once and splits what arrives into responses."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple


class RawResponse(NamedTuple):
    """One response. `is_complete`: its body has ended as its headers say."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool


def raw_request(method: str, path: str, body: Any = None, headers: str = "", version: str = "1.1") -> bytes:
    """Return the bytes of a request; `headers`: lines that end with CRLF; `body`: JSON, or bytes as they are."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if body is not None else ""
    return f"{method} {path} HTTP/{version}\r\nHost: x\r\n{kind}{headers}\r\n".encode() + data


def read_to_end(sock: socket.socket) -> bytes:
    """Return everything until the server closes or resets the connection."""
    received = bytearray()
    try:
        while part := sock.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


def exchange(port: int, *requests: bytes, timeout_s: float = 60.0) -> bytes:
    """Send the requests in one piece; the last one must ask the server to close. Returns all that it sends."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as sock:
        sock.sendall(b"".join(requests))
        return read_to_end(sock)


def split_responses(received: bytes, *methods: str) -> list[RawResponse]:
    """Split the answers to requests of these methods. Raises `AssertionError` for bytes that belong to none."""
    responses = []
    rest = received
    for method in methods:
        if not rest:
            break
        head, found, rest = rest.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert found and lines[0].startswith("HTTP/1."), f"not a response: {head[:200]!r}"
        status = int(lines[0].split()[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if method == "HEAD" or status in (204, 304):
            body, is_complete = b"", True
        elif headers.get("transfer-encoding") == "chunked":
            body, is_complete, rest = _chunks(rest)
        elif "content-length" in headers:
            length = int(headers["content-length"])
            body, rest = rest[:length], rest[length:]
            is_complete = len(body) == length
        else:
            body, is_complete, rest = rest, True, b""
        responses.append(RawResponse(status, headers, body, is_complete))
    assert not rest, f"bytes after the last response: {rest[:300]!r}"
    return responses


def _chunks(data: bytes) -> tuple[bytes, bool, bytes]:
    body = bytearray()
    while True:
        size, found, after = data.partition(b"\r\n")
        if not found:
            return bytes(body), False, b""
        length = int(size, 16)
        if len(after) < length + 2:
            return bytes(body + after[:length]), False, b""
        assert after[length : length + 2] == b"\r\n"
        body += after[:length]
        data = after[length + 2 :]
        if not length:
            return bytes(body), True, data
