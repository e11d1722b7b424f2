"""Addresses of servers: of this home's server, or as a user gives them. Opens connections; sends nothing."""

from __future__ import annotations

import http.client
import socket
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, InvalidRequest, ModelUnavailable
from pipeline.supervise import listen_fd
from pipeline.supervise.unix_listener import socket_path
from pipeline.tls import trust

EXPECTED = "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH"


class ServerAddress(NamedTuple):
    """Where a server listens: TCP, TLS, or a Unix socket."""

    scheme: str  # http, https or unix
    host: str = ""
    port: int = 0
    path: str = ""  # of the Unix socket; otherwise what precedes /v1 in the URL, without a slash at its end
    cacert: str = ""  # PEM file with the authorities of the server's certificate; "": those of the system
    home: Config | None = None  # whose server it is, and whose certificate is accepted then

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
                return _TlsConnection(self, timeout_s)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def tls(self) -> ssl.SSLContext | None:
        """What is trusted; None without TLS. Raises `ConfigError`, `InvalidRequest`."""
        if self.scheme != "https":
            return None
        return trust.own_server(self.home) if self.home is not None else trust.other_server(self.cacert)

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


class _TlsConnection(http.client.HTTPSConnection):
    """HTTP over TLS. `connect` raises `ConfigError` and `ModelUnavailable` for a server that is not the right one."""

    def __init__(self, address: ServerAddress, timeout_s: float) -> None:
        super().__init__(address.host, address.port, timeout=timeout_s, context=address.tls())
        self._address = address

    def connect(self) -> None:
        try:
            super().connect()
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise ConfigError(
                f"{self._address}: its certificate is not trusted ({error.verify_message}); --cacert FILE names the "
                f"authority that signed it, or the certificate itself",
                "cacert",
            ) from None
        except ssl.SSLEOFError:  # the connection ended, as when the server is being restarted
            raise
        except ssl.SSLError as error:
            self.close()
            raise ModelUnavailable(f"{self._address}: the TLS handshake failed ({error.reason or error})") from None


def of_config(config: Config) -> ServerAddress:
    """The address of this home's server. Where clients of TLS need a certificate, that is its Unix socket."""
    if config.server.unix_socket and (config.server.tls_client_ca or not config.server.host):
        return ServerAddress("unix", path=str(socket_path(config)))
    scheme = "https" if config.server.tls_cert else "http"
    return ServerAddress(scheme, listen_fd.reachable(config.server.host), config.server.port, home=config)


def parse(text: str, option: str = "--url", cacert: str = "") -> ServerAddress:
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
    if cacert and url.scheme != "https":
        raise InvalidRequest(f"--cacert: {option} {text!r} has no TLS; write https://", "cacert")
    return ServerAddress(url.scheme, url.hostname, port or (443 if url.scheme == "https" else 80), path, cacert)


def key_of_config(config: Config) -> str:
    """An API key of the configuration, a tenant's rather than an administrator's; "" if none is configured."""
    keys = sorted(config.auth.api_keys, key=lambda key: key.admin)
    return keys[0].key if keys else ""
