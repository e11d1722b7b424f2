"""Encoding of server-sent events (the "Server-sent events" section of the HTML standard).

Data is one line: JSON without a newline.
"""

from __future__ import annotations

import re

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}
RETRY_MS = 1000  # the reconnection delay that a stream announces
DONE = b"data: [DONE]\n\n"  # the last event of a stream, as in OpenAI's API
COMMENT = b":\n"  # clients skip it, see `comment`
_PIECE = re.compile(rb":[^\n]*\n|(?:[^\n]+\n)+\n")


def event(data: bytes, event_id: bytes = b"", name: bytes = b"") -> bytes:
    """Return one event; without an id the client keeps the id of the event before, and without a name it has none."""
    if name and not event_id:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    if name:
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id, name, data)
    if event_id:
        return b"id: %b\ndata: %b\n\n" % (event_id, data)
    return b"data: %b\n\n" % data


def retry_field(delay_ms: int = RETRY_MS) -> bytes:
    """Return the `retry` field, a line of the event that follows.

    Alone it would be an event without data, which the clients of OpenAI and Anthropic take for damaged JSON.
    """
    return b"retry: %d\n" % delay_ms


def comment(text: str) -> bytes:
    """Return a comment: a line of the event that follows.

    With an empty line of its own, OpenAI's client would take it for an event without data once an event had an id.
    """
    return b": %b\n" % " ".join(text.split()).encode("utf-8", "replace")


def pieces(data: bytes) -> list[bytes]:
    """Return the events of `data`, each with its end, and the comments before them, each by itself."""
    return _PIECE.findall(data)


def http_chunk(data: bytes) -> bytes:
    """Return `data` as one chunk of a chunked HTTP/1.1 body (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)
