"""Addresses of servers: of this home's server, or as a user gives them. Opens connections; sends nothing."""

from __future__ import annotations

import http.client
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from pipeline.config.schema import Config
from pipeline.errors import InvalidRequest
from pipeline.supervise import listen_fd

EXPECTED = "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH"


class ServerAddress(NamedTuple):
    """Where a server listens: TCP, TLS (in front of the server is a proxy then), or a Unix socket."""

    scheme: str  # http, https or unix
    host: str = ""
    port: int = 0
    path: str = ""  # of the Unix socket; otherwise what precedes /v1 in the URL, without a slash at its end

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that is opened by its first request."""
        match self.scheme:
            case "unix":
                return _UnixConnection(self.path, timeout_s)
            case "https":
                return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def target(self, path: str) -> str:
        """The request target of the API's `path`, for example /v1/models."""
        return path if self.scheme == "unix" else self.path + path


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


def of_config(config: Config) -> ServerAddress:
    """The address of this home's server."""
    return ServerAddress("http", listen_fd.reachable(config.server.host), config.server.port)


def parse(text: str, option: str = "--url") -> ServerAddress:
    """Read an address. Raises `InvalidRequest` that names the option."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise InvalidRequest(f"{option} {text!r}: {EXPECTED}", "url")
        return ServerAddress("unix", path=path)
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise InvalidRequest(f"{option} {text!r}: {error}; {EXPECTED}", "url") from None
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.username:
        raise InvalidRequest(f"{option} {text!r}: {EXPECTED}", "url")
    path = url.path.rstrip("/").removesuffix("/v1")  # the base URL of OpenAI's clients ends with /v1
    return ServerAddress(url.scheme, url.hostname, port or (443 if url.scheme == "https" else 80), path)


def key_of_config(config: Config) -> str:
    """An API key of the configuration, a tenant's rather than an administrator's; "" if none is configured."""
    keys = sorted(config.auth.api_keys, key=lambda key: key.admin)
    return keys[0].key if keys else ""
