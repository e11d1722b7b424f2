"""The files of the page at `/` and of `/docs`, as the browser gets them: no build step, no other server.

index.html, page.css             the page: chat, settings, the state of the server
docs.html, docs.js               the reader of /openapi.json
main.js                          starts the page, and binds keys and buttons
client.js                        requests to the server: API key, streams, resumption
conversations.js                 conversations in localStorage, within bounds
chat.js, message.js, tokens.js   the conversation on the screen: streaming, editing, token probabilities
settings.js                      parameters, with the bounds that /openapi.json states
server.js, metrics.js            the live view of the server
dom.js                           construction of elements
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class File(NamedTuple):
    """A file, its media type and its entity tag."""

    data: bytes
    media_type: str
    etag: str


@functools.cache
def files() -> dict[str, File]:
    """Return the files by name, read once and together, so that they are of one release."""
    found = (path for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in _TYPES)
    return {path.name: make_file(path.read_bytes(), _TYPES[path.suffix]) for path in found}


def make_file(data: bytes, media_type: str) -> File:
    """Return `data` with its entity tag."""
    return File(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
