"""Clients of an OpenAI-compatible server, for the benchmark: plain sockets, one epoll loop, streams read as they come.

Clients share the cores with the server that they measure, so nothing is parsed during a run: received data is stored
with its time, and `Response.parse` reads it afterwards.  Implements HTTP/1.1 with chunked bodies and server-sent
events; nothing here depends on which server is measured.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

END = b"\r\n0\r\n\r\n"  # of a chunked body; the line break before it excludes a header that ends in 0
CONNECT_S = 10.0


class ClientRequest(NamedTuple):
    """One request: a body for `path`, and the tenant that sends it."""

    body: dict[str, Any]
    key: str = ""  # sent as bearer token
    tenant: str = ""
    path: str = "/v1/completions"

    def encode(self, host: str) -> bytes:
        """The bytes of the HTTP request."""
        body = json.dumps(self.body).encode()
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{key}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Response:
    """The response to one request. Times are `perf_counter` seconds."""

    def __init__(self, request: ClientRequest, sent: float) -> None:
        self.request = request
        self.sent = sent
        self.parts: list[tuple[float, bytes]] = []
        self.error = ""  # of the connection
        self.status = 0
        self.prompt_tokens = self.cached_tokens = self.tokens = 0
        self.finish = ""
        self.text = ""
        self.times: list[float] = []  # of the events that brought text

    @property
    def is_good(self) -> bool:
        """Whether the stream brought text and ended with a stop or at its limit."""
        return self.status == 200 and not self.error and bool(self.times) and self.finish in ("stop", "length")

    @property
    def first_s(self) -> float:
        """Seconds from the request to the first text."""
        return self.times[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each event with text and the next."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def parse(self) -> None:
        """Read the stored stream. Anything that is not an OpenAI event goes into `error`."""
        raw = b"".join(data for _, data in self.parts)
        head, found, body = raw.partition(b"\r\n\r\n")
        try:
            self.status = int(head.split(b" ", 2)[1])
        except (IndexError, ValueError):
            self.error = self.error or f"no HTTP: {raw[:80]!r}"
            return
        if self.status != 200:
            self.error = self.error or body[:300].decode(errors="replace")
            return
        at = len(head) + len(found)
        ends, moments, total = [], [], 0
        for when, data in self.parts:
            total += len(data)
            ends.append(total)
            moments.append(when)
        part = 0
        pending, events = b"", []
        while True:
            size_end = raw.find(b"\r\n", at)
            if size_end < 0:
                break
            size = int(raw[at:size_end].split(b";")[0] or b"0", 16)
            chunk_end = size_end + 2 + size
            if not size or chunk_end > len(raw):
                break
            while ends[part] < chunk_end:
                part += 1
            *lines, pending = (pending + raw[size_end + 2 : chunk_end]).split(b"\n")
            events += [(moments[part], line[6:]) for line in lines if line.startswith(b"data: {")]
            at = chunk_end + 2
        for when, event in events:
            self._event(when, json.loads(event))

    def _event(self, when: float, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
        if event.get("usage"):
            self.prompt_tokens = event["usage"]["prompt_tokens"]
            details = event["usage"].get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens", 0)
            self.tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text:
                self.text += text
                self.times.append(when)
            self.finish = choice.get("finish_reason") or self.finish


class Client:
    """One connection, which sends each request when the response to the one before has ended."""

    def __init__(self, address: tuple[str, int], requests: Iterable[ClientRequest]) -> None:
        self._address = address
        self._requests = deque(requests)
        self.responses: list[Response] = []
        self.connections = 0
        self._message = b""
        self._sent = 0  # over this connection
        self.socket: socket.socket
        self._connect()

    def _connect(self) -> None:
        self.socket = socket.create_connection(self._address, CONNECT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections += 1
        self._sent = 0

    def next(self) -> bool:
        """Send the next request. Returns False when none is left."""
        if not self._requests:
            return False
        request = self._requests.popleft()
        self._message = request.encode(f"{self._address[0]}:{self._address[1]}")
        self.responses.append(Response(request, time.perf_counter()))
        self._send()
        return True

    def _send(self) -> None:
        self._sent += 1
        try:
            self.socket.sendall(self._message)
        except OSError:
            self._again()

    def _again(self) -> None:
        """Send again over a new connection: the server has closed this one after a response."""
        self.socket.close()
        self._connect()
        self._send()

    def read(self) -> bool:
        """Receive data. Returns whether the response has ended."""
        response = self.responses[-1]
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        if not data:
            if not response.parts and self._sent > 1:
                self._again()
                return False
            response.error = "the connection was closed"
            self.socket.close()
            self._connect()
            return True
        response.parts.append((time.perf_counter(), data))
        if not data.endswith(END) and len(data) < len(END):
            data = b"".join(part for _, part in response.parts[-len(END) :])
        if data.endswith(END):
            return True
        first = response.parts[0][1]
        return not first.startswith(b"HTTP/1.1 200") and _is_whole(b"".join(part for _, part in response.parts))


def _is_whole(raw: bytes) -> bool:
    """Whether a response with a Content-Length (a refusal) is complete."""
    head, _, body = raw.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return False


class Run(NamedTuple):
    """All responses of a run: client by client, each client's in the order of its requests."""

    responses: list[Response]
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Duration of the run."""
        return self.ended - self.began


def drive(
    address: tuple[str, int],
    clients: Iterable[Iterable[ClientRequest]],
    limit_s: float = 600.0,
    meanwhile: Callable[[float], None] | None = None,
    starts: Sequence[float] = (),
) -> Run:
    """Run all clients concurrently until every request has its response or `limit_s` has passed.

    starts: for each client, seconds from the beginning to its first request, ascending; empty: all at once.
    meanwhile: called as `meanwhile(now)` in every round of the loop, at least every 50 ms.

    Raises `OSError` when no server listens at `address`.
    """
    active: dict[int, Client] = {}
    poll = select.epoll()
    # Clients that begin at once are connected before the time is taken.
    everyone = [] if starts else [Client(address, requests) for requests in clients]
    waiting = deque(zip(starts, clients, strict=True)) if starts else deque()

    def begin(client: Client) -> None:
        if client.next():
            active[client.socket.fileno()] = client
            poll.register(client.socket.fileno(), select.EPOLLIN)

    began = time.perf_counter()
    try:
        for client in everyone:
            begin(client)
        while active or waiting:
            while waiting and time.perf_counter() - began >= waiting[0][0]:
                everyone.append(Client(address, waiting.popleft()[1]))
                begin(everyone[-1])
            pause = 0.05 if meanwhile else 1.0
            if waiting:
                pause = max(0.0, min(pause, waiting[0][0] - (time.perf_counter() - began)))
            for fd, _ in poll.poll(pause):
                client = active[fd]
                connections = client.connections
                has_more = not client.read() or client.next()
                if client.connections != connections:
                    # epoll has dropped the closed descriptor; the new one may have the same number.
                    del active[fd]
                    fd = client.socket.fileno()
                    active[fd] = client
                    poll.register(fd, select.EPOLLIN)
                if not has_more:
                    del active[fd]
                    poll.unregister(fd)
            now = time.perf_counter()
            if meanwhile is not None:
                meanwhile(now)
            if now - began > limit_s:
                for late in active.values():
                    late.responses[-1].error = f"not answered within {limit_s:g} s"
                break
        ended = time.perf_counter()
    finally:
        poll.close()
        for client in everyone:
            client.socket.close()
    responses = [response for client in everyone for response in client.responses]
    for response in responses:
        response.parse()
    return Run(responses, began, ended)
