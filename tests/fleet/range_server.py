"""A web server of a folder, with ranges, on a loopback port, and with faults: what a bad mirror may do."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

Fault = Callable[["Handler", bytes], bool]  # whether it has answered; the bytes are those of the right answer


class RangeServer(http.server.ThreadingHTTPServer):
    """`fault` sees each GET before it is answered."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.fault: Fault = lambda handler, body: False
        self.requests: Counter[str] = Counter()  # GETs by path
        self.sent = 0  # bytes of ranges, counted before they are written: a client that has them finds them counted
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may close the connection early; that is no error here."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: RangeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests[self.path] += 1
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        try:
            self._answer(is_head=False)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def _answer(self, is_head: bool) -> None:
        path = self.server.root / self.path.partition("?")[0].lstrip("/")
        if not path.is_file():
            self.refuse(404)
            return
        size = path.stat().st_size
        if is_head:
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)
        if first >= size:
            self.refuse(416)
            return
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last - first + 1)
        if not self.server.fault(self, body):
            self.send_range(first, size, body)

    def send_range(self, first: int, size: int, body: bytes, length: int | None = None) -> None:
        """Answer with a range; `length`: the Content-Length to claim."""
        with self.server.lock:
            self.server.sent += len(body)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{size}")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextlib.contextmanager
def served(root: Path) -> Iterator[RangeServer]:
    """A running server of a folder."""
    server = RangeServer(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
