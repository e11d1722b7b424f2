"""A body that is much larger than a server accepts, and what it costs the server's memory."""

from __future__ import annotations

import socket
from pathlib import Path

SIZE = 100 << 20
PART = b" " * (1 << 16)


def send(port: int, path: str, authorization: str, *, is_chunked: bool) -> bytes:
    """POST 100 MiB; the response. `is_chunked`: without Content-Length."""
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {SIZE}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n"
    part = b"%x\r\n%b\r\n" % (len(PART), PART) if is_chunked else PART
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}Authorization: {authorization}\r\n\r\n".encode())
        try:
            for _ in range(SIZE // len(PART)):
                connection.sendall(part)
            if is_chunked:
                connection.sendall(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has answered and closed the connection
        answer = b""
        while b"\r\n\r\n" not in answer or b"}" not in answer:
            data = connection.recv(1 << 16)
            if not data:
                break
            answer += data
        return answer


def peak_bytes(pid: int) -> int:
    """The largest resident size of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
