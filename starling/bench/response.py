"""A request of the load client and its response: what was received when, and what that says.

Received data is stored with its time; `Response.parse` reads it afterwards, so that a client that shares its cores
with the server takes as little of them as possible during a measurement.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import MutableSequence
from typing import Any, NamedTuple

import msgspec

TOKENS = ("text", "content", "reasoning_content", "reasoning")  # fields of a choice or of its delta that hold output
MAX_MESSAGE = 300  # characters of an error message
MAX_ID = 64  # of the name that the server gives a request

# Why a response does not count. HTTP errors are "HTTP 429", errors in a stream "error CODE".
TIMEOUT, BROKEN, NO_CONNECTION = "timeout", "broken stream", "no connection"
NO_STREAM, INVALID, EMPTY, UNFINISHED = "not a stream", "invalid stream", "no output", "unfinished"


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
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body


class Response:
    """The response to one request. Times are seconds of the client's clock."""

    def __init__(self, request: ClientRequest, sent: float, due: float | None = None) -> None:
        """`due`: when the request should have been sent; latencies count from there."""
        self.request = request
        self.sent = sent
        self.due = sent if due is None else due
        self.ended = 0.0  # when it was complete, or failed; 0.0: it runs
        self.head_at = 0.0  # when the first bytes came
        self.parts: list[tuple[float, bytes]] = []  # of the body
        self.status = 0
        self.id = ""  # the server's, by which its logs name the request; "": it sent none
        self.failure = ""  # the kind, for counting
        self.error = ""  # the message
        self.prompt_tokens = self.cached_tokens = self.tokens = 0
        self.has_usage = False  # the server has counted the tokens; otherwise `tokens` is the number of events
        self.finish = ""
        self.text = ""
        self.times: MutableSequence[float] = array("d")  # of the events that brought output
        self._is_done = False

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended as it should, however little it brought."""
        return bool(self.ended) and not self.failure

    @property
    def is_good(self) -> bool:
        """Whether the stream brought text and ended with a stop or at its limit."""
        return self.is_complete and bool(self.times) and self.finish in ("stop", "length")

    @property
    def first_s(self) -> float:
        """Seconds from the request to the first output."""
        return self.times[0] - self.due

    @property
    def total_s(self) -> float:
        """Seconds from the request to the end of the response."""
        return self.ended - self.due

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each event with output and the next."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def fail(self, kind: str, message: str = "") -> None:
        """Note the first failure; later ones follow from it."""
        if not self.failure:
            self.failure, self.error = kind, (message or kind)[:MAX_MESSAGE]

    def parse(self) -> None:
        """Read the stored body, and drop it."""
        parts, self.parts = self.parts, []
        if not self.ended:
            self.fail(UNFINISHED)
        if not self.status:
            self.fail(BROKEN)
            return
        if self.status != 200:
            message = b"".join(data for _, data in parts)[:MAX_MESSAGE].decode(errors="replace").strip()
            self.failure = self.failure or f"HTTP {self.status}"
            self.error = message or self.error or self.failure
            return
        pending, events = b"", 0
        for when, data in parts:
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    events += 1
                    self._read(when, line[5:].strip())
        if parts and not events:
            self.fail(NO_STREAM, f"no server-sent events, but {parts[0][1][:80]!r}")
        if not (self._is_done or self.finish):
            self.fail(BROKEN, "the stream ended without a finish reason and without [DONE]")
        if not self.has_usage:
            self.tokens = len(self.times)

    def _read(self, when: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            self._event(when, msgspec.json.decode(data))
        except (msgspec.DecodeError, AttributeError, TypeError, KeyError, UnicodeDecodeError):
            self.fail(INVALID, f"an event that is not an object of OpenAI's API: {data[:80]!r}")

    def _event(self, when: float, event: dict[str, Any]) -> None:
        if error := event.get("error"):
            code = error.get("code") or error.get("type") if isinstance(error, dict) else ""
            self.fail(f"error {code}".strip(), json.dumps(error))
        if usage := event.get("usage"):
            self.has_usage = True
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            self.tokens = int(usage.get("completion_tokens") or 0)
        for choice in event.get("choices") or ():
            source = choice.get("delta") or choice
            # Some servers send reasoning under both of its names.
            skipped = "reasoning" if source.get("reasoning_content") else ""
            text = "".join(source[name] for name in TOKENS if source.get(name) and name != skipped)
            if text or source.get("tool_calls"):
                self.text += text
                self.times.append(when)
            self.finish = choice.get("finish_reason") or self.finish
