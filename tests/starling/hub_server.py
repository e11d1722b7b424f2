"""A small model hub: the part of the Hugging Face Hub's HTTP API by which `huggingface_hub` downloads files."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".gguf", ".safetensors", ".bin")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """`repositories` are files by name, by repository. A repository in `private` needs `TOKEN`."""

    TOKEN = "hf_secret"
    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.private: set[str] = set()
        self.substituted: dict[str, bytes] = {}  # contents that are sent in place of the announced ones
        self.cuts = 0  # bodies of files that end early
        self.requests: list[tuple[str, str]] = []
        self.authorizations: set[str | None] = set()  # of these requests
        self.redirect = ""  # where files are
        self.before: Callable[[str], None] = lambda name: None  # each body of a file

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may close the connection early; that is no error here."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Hub:
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    """As the hub describes a file: the SHA-256 of large ones, Git's name of the contents of all."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    found = {"rfilename": name, "size": len(data), "blobId": blob}
    if name.endswith(LARGE):
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return found


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        self.server.authorizations.add(self.headers.get("Authorization"))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.send_info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.send_file(found[1], found[2], found[3])
        else:
            self.answer(404, b"{}", {})

    def files_of(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """The files, or None after an error has been sent."""
        is_hidden = repository in self.server.private and self.headers.get("Authorization") != f"Bearer {Hub.TOKEN}"
        files = self.server.repositories.get(repository)
        if files is None or is_hidden:
            self.answer(401 if is_hidden else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        if revision not in ("main", COMMIT):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None
        return files

    def send_info(self, repository: str, revision: str) -> None:
        files = self.files_of(repository, revision)
        if files is None:
            return
        siblings = [_sibling(name, data) for name, data in files.items()]
        info = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "tags": []}
        self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def send_file(self, repository: str, revision: str, name: str) -> None:
        files = self.files_of(repository, revision)
        if files is None:
            return
        if name not in files:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        announced = hashlib.sha256(files[name]).hexdigest()
        data = self.server.substituted.get(name, files[name])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{announced}"', "Accept-Ranges": "bytes"}
        if self.server.redirect:
            size = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
            self.answer(302, b"", {**headers, **size, "Location": self.server.redirect})
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if self.command == "GET":
            self.server.before(name)
        if found:
            begin, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            self.answer(206, data[begin : end + 1], headers)
        else:
            self.answer(200, data, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cuts and status in (200, 206) and len(body) > 10_000:
            self.server.cuts -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass
