"""A small HTTP client, for one server on a port of this machine."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from starling.client.address import ServerAddress


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "code", "param"}
        return error


class Event(NamedTuple):
    id: str
    data: Any  # decoded JSON, or "[DONE]"


class HttpClient:
    """Requests to `port`, which a subclass sets."""

    port: int
    tls: ssl.SSLContext | None = None  # what is trusted; None: plain HTTP
    unix_socket: Path | None = None  # instead of the port

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        if self.unix_socket is not None:
            return ServerAddress("unix", path=str(self.unix_socket)).connection(timeout_s)
        if self.tls is not None:
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout_s, context=self.tls)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Send a request. `body`: bytes are sent as they are, anything else as JSON."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            kind = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.request("GET", path, None, headers)

    def stream(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Stream:
        return Stream(self, path, {**body, "stream": True}, headers)

    def resume(self, path: str, headers: dict[str, str] | None = None) -> Stream:
        """Resume a stream with GET."""
        return Stream(self, path, None, headers)


class Stream:
    """An open stream of events."""

    def __init__(self, server: HttpClient, path: str, body: Any, headers: dict[str, str] | None = None) -> None:
        self._connection = server.connect()
        if body is None:
            self._connection.request("GET", path, None, headers or {})
        else:
            kind = {"Content-Type": "application/json", **(headers or {})}
            self._connection.request("POST", path, json.dumps(body).encode(), kind)
        sock = self._connection.sock  # before the response: with `Connection: close` the attribute is cleared
        assert isinstance(sock, socket.socket)
        self.sock = sock
        self.response = self._connection.getresponse()
        if self.response.status != 200:
            refusal = self.response.read()
            self._connection.close()
            raise AssertionError(refusal)
        assert self.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"

    def events(self) -> Iterator[Event]:
        """The events until the stream ends."""
        where = ""
        while line := self.response.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if line.startswith(b":"):
                continue  # a comment
            if name == "id":
                where = value
            elif name == "data":
                yield Event(where, value if value == "[DONE]" else json.loads(value))
            else:
                assert name in ("", "retry")

    def all(self) -> list[Event]:
        events = list(self.events())
        self.close()
        return events

    def close(self) -> None:
        self.response.close()
        self._connection.close()
