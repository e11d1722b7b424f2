"""One streamed answer, continued when its connection ends too early.

    POST /v1/chat/completions or /v1/generate ─┬─> pieces of text ─> [DONE]
              GET /v1/requests/ID <── lost ────┘     with Last-Event-ID: nothing is missing, nothing comes twice

A request always has a seed, drawn here if the user gives none.  If the gateway dies before it has named or journalled
the request, it is sent again, and the same text comes again: what was yielded already is compared and left out.
Closing the iterator closes the connection, by which the server cancels the request.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pipeline.errors import (
    CODES,
    ConfigError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    ResourceError,
    StarlingError,
)
from starling.client.address import ServerAddress
from starling.client.events import read_events

RESUME_S = 60.0  # from the end of a connection until its answer counts as lost; the server keeps it as long
RETRY_S = 0.2  # between two attempts
TIMEOUT_S = 330.0  # without a byte; a request waits up to server.request_timeout_ms (300 s) in queues
SEED_BITS = 53  # of a drawn seed: a number that every JSON reader keeps exactly


class Usage(NamedTuple):
    """Numbers of tokens."""

    prompt: int = 0
    cached: int = 0  # of the prompt
    output: int = 0


class Lost(Exception):
    """The connection ended before the answer did."""


class Answer:
    """One answer: iterate over `pieces`; the other attributes are complete at its end."""

    def __init__(
        self,
        address: ServerAddress,
        path: str,
        body: dict[str, Any],
        key: str = "",
        on_wait: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`on_wait(reason)` is called when the connection is lost and the answer will be continued."""
        self._address = address
        self._path = path
        seed = secrets.randbits(SEED_BITS)
        self._body = {"seed": seed, **body, "stream": True}
        if path.endswith("/chat/completions"):
            self._body["stream_options"] = {"include_usage": True}
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._on_wait = on_wait
        self._clock = clock
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._last_id = ""
        self._expected = ""  # text that must come again, and is not yielded twice
        self._events = 0
        self._is_connected = False  # once: a server listened there
        self.request_id = ""
        self.seed: int = self._body["seed"]
        self.model = ""
        self.text = ""  # yielded so far
        self.finish_reason = ""
        self.usage = Usage()
        self.resumed = 0  # connections that ended early
        self.begun = self.ended = clock()
        self.first_at = 0.0  # when the first text came; 0.0: none yet

    def pieces(self) -> Iterator[str]:
        """The text, in pieces as they arrive. Raises `StarlingError` with the server's code, or `ModelUnavailable`."""
        self.begun = self._clock()
        lost_at = 0.0
        while True:
            before = self._events
            try:
                yield from self._attempt()
                self.ended = self._clock()
                return
            except Lost as lost:
                now = self._clock()
                if not self._is_connected:
                    raise ModelUnavailable(f"no server answers at {self._address}: {lost}") from None
                if not lost_at or self._events > before:
                    lost_at = now
                    self.resumed += 1
                    self._on_wait(str(lost))
                elif now - lost_at > RESUME_S:
                    raise ModelUnavailable(
                        f"the answer was lost: the server did not continue it within {RESUME_S:.0f} s ({lost})"
                    ) from None
                self._sleep(RETRY_S)

    def _attempt(self) -> Iterator[str]:
        """One connection. Raises `Lost` if it ends too early."""
        connection = self._address.connection(self._timeout_s)
        try:
            response = self._send(connection)
            is_resumed = bool(self.request_id)
            if response.status == 404 and is_resumed:
                self._start_again()  # the gateway died before it had journalled the request
                raise Lost("the server does not know the request any more")
            if response.status != 200:
                error = read_failure(response.status, response.read())
                if self.resumed and CODES.get(error.code, CODES["INTERNAL"]).retry:
                    raise Lost(error.message)
                raise error
            self.request_id = response.headers.get("X-Starling-Request") or self.request_id
            for event in read_events(response.readline):
                if event.data == "[DONE]":
                    return
                text = self._read(json.loads(event.data))
                self._events += 1
                self._last_id = event.id or self._last_id
                if text:
                    self.first_at = self.first_at or self._clock()
                    self.text += text
                    yield text
            raise Lost("the stream ended early")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Lost(str(error) or type(error).__name__) from None
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        connection.connect()
        self._is_connected = True
        if self.request_id:
            resume = {"Last-Event-ID": self._last_id} if self._last_id else {}
            if not resume:
                self._expected = self.text
            target = self._address.target(f"/v1/requests/{self.request_id}")
            connection.request("GET", target, headers={**self._headers, **resume})
        else:
            headers = {**self._headers, "Content-Type": "application/json"}
            data = json.dumps(self._body, ensure_ascii=False).encode("utf-8", "replace")
            connection.request("POST", self._address.target(self._path), data, headers)
        return connection.getresponse()

    def _start_again(self) -> None:
        self.request_id = self._last_id = ""
        self._expected = self.text

    def _read(self, event: dict[str, Any]) -> str:
        """The new text of an event of either endpoint. Raises the server's error."""
        if error := event.get("error"):
            raise failure(error)
        self.model = event.get("model") or self.model
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            self.usage = Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])
        text = ""
        for choice in event.get("choices", [event] if "index" in event else []):
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return self._new_part(text)

    def _new_part(self, text: str) -> str:
        again = text[: len(self._expected)]
        if not self._expected.startswith(again):
            raise InternalError(
                f"the server sent {again[:40]!r} where the same request had given {self._expected[:40]!r} before; "
                f"`starling verify` checks the model"
            )
        self._expected = self._expected[len(again) :]
        return text[len(again) :]


# ------------------------------------------------------------------ errors


def read_failure(status: int, data: bytes) -> StarlingError:
    """The error in the body of a response with `status`."""
    try:
        return failure(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        text = data[:200].decode("utf-8", "replace").strip()
        return ModelUnavailable(f"the server answered with HTTP status {status}: {text or 'no body'}")


def failure(error: dict[str, Any]) -> StarlingError:
    """The exception for an error object of the API, of the class that decides the command's exit code."""
    code, message, param = str(error.get("code")), str(error.get("message")), str(error.get("param") or "")
    match code:
        case "MODEL_NOT_FOUND":
            return ModelNotFound(message, param)
        case "INVALID_REQUEST" | "CONTEXT_LENGTH_EXCEEDED" | "REQUEST_TOO_LARGE" | "REFUSED_BY_PLUGIN":
            return InvalidRequest(message, param, code=code)
        case "INVALID_API_KEY" | "FORBIDDEN" | "QUOTA_EXHAUSTED":
            return ConfigError(f"{message}; --key or STARLING_API_KEY gives another key", param, code=code)
        case "MODEL_DAMAGED":
            return ConfigError(message, param, code=code)
        case "INSUFFICIENT_RESOURCES":
            return ResourceError(message, param, code=code)
    return StarlingError(code, message, param)


def get_json(address: ServerAddress, path: str, key: str = "", timeout_s: float = 30.0) -> Any:
    """The decoded body of a GET request. Raises `StarlingError`, `ModelUnavailable` if no server answers.

    A connection that is accepted and then lost is repeated: a gateway that restarts leaves its successor the socket.
    """
    deadline = time.monotonic() + RESUME_S
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    while True:
        connection = address.connection(timeout_s)
        try:
            connection.request("GET", address.target(path), headers=headers)
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise read_failure(response.status, data)
            return _decoded(address, path, data)
        except UnicodeError as error:  # of a host name
            raise ModelUnavailable(f"no server answers at {address}: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            if connection.sock is None or time.monotonic() > deadline:
                raise ModelUnavailable(f"no server answers at {address}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        time.sleep(RETRY_S)


def _decoded(address: ServerAddress, path: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        shown = data[:200].decode("utf-8", "replace").strip()
        raise ModelUnavailable(
            f"{address} answered {path} with HTTP status 200 and a body that is no JSON: {shown or 'empty'}; "
            f"is it a Starling server?"
        ) from None
