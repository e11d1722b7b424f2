"""A real HTTP server of one file, with ranges and the faults of real servers."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Callable
from typing import Any

TRICKLE_S = 0.01  # between two bytes
WAIT_S = 60.0  # for a test to release what it holds


class FileServer(http.server.ThreadingHTTPServer):
    """Serves `content` under any path. Faults are attributes that a test sets; `ranges` is what was requested."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.tag = '"one"'
        self.has_ranges = True
        self.status = 0  # answered to every request; 0: what is right
        self.failures = 0  # requests that are answered with 503
        self.cuts = 0  # bodies that end early
        self.cut_at = 0  # after so many bytes
        self.announced = 0  # a wrong total length
        self.redirect = ""
        self.stalls = 0  # bodies that stop until `released`, after `cut_at` bytes
        self.trickles = False  # a byte of an answer every `TRICKLE_S`, until `released`
        self.released = threading.Event()
        self.before_answer: Callable[[], object] = lambda: None  # each answer, of which nothing is sent yet
        self.before: Callable[[FileServer, int], None] = lambda server, begin: None  # each body, with its first byte
        self.ranges: list[str | None] = []
        self.authorizations: set[str | None] = set()
        self.paths: set[str] = set()
        self.mutex = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may close the connection early; that is no error here."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/model.gguf"

    def __enter__(self) -> FileServer:
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.released.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        with server.mutex:
            server.ranges.append(wanted)
            server.authorizations.add(self.headers.get("Authorization"))
            server.paths.add(self.path)
            fails, server.failures = server.failures > 0, max(0, server.failures - 1)
        server.before_answer()
        if server.redirect:
            self.answer(302, b"", {"Location": server.redirect})
        elif server.status or fails:
            self.answer(server.status or 503, b"no", {"Retry-After": "0"})
        else:
            self.send_file(wanted)

    def send_file(self, wanted: str | None) -> None:
        server = self.server
        content, tag = server.content, server.tag
        headers = {"ETag": tag} if tag else {}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "") if server.has_ranges else None
        if found and self.headers.get("If-Range", tag) == tag:
            begin, total = int(found[1]), server.announced or len(content)
            if begin >= len(content):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            end = min(int(found[2] or total - 1), total - 1)
            body = content[begin : end + 1]
            self.answer(206, body, {**headers, "Content-Range": f"bytes {begin}-{end}/{total}"}, begin)
        else:
            self.answer(200, content, headers, 0)

    def answer(self, status: int, body: bytes, headers: dict[str, str], begin: int = -1) -> None:
        server = self.server
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if begin >= 0:
            server.before(server, begin)
            with server.mutex:
                is_cut = server.cuts > 0 and len(body) > server.cut_at
                server.cuts -= is_cut
                stalls = server.stalls > 0 and len(body) > server.cut_at
                server.stalls -= stalls
            if stalls:
                self.wfile.write(body[: server.cut_at])
                server.released.wait(WAIT_S)
                body = body[server.cut_at :]
            if server.trickles and len(body) > 1:
                for at in range(len(body)):
                    if server.released.wait(TRICKLE_S):
                        break
                    self.wfile.write(body[at : at + 1])
                self.close_connection = True
                return
            if is_cut:
                self.wfile.write(body[: server.cut_at])
                self.close_connection = True
                return
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass
