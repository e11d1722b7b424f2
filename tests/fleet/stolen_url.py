"""Requests as a thief of a signed URL sends them."""

from __future__ import annotations

import http.client
import time
from urllib.parse import urlsplit

EXPIRY_S = 60.0  # for the server's clock to pass the end of a URL that is valid for 1 s


def asked(method: str, url: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """A request as a thief sends it."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.request(method, f"{parts.path}?{parts.query}", body, headers)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def wait_for_end(url: str) -> None:
    """Wait until the server refuses a URL."""
    deadline = time.monotonic() + EXPIRY_S
    while asked("GET", url)[0] == 200:
        assert time.monotonic() < deadline, "the server still answers"
        time.sleep(0.05)
