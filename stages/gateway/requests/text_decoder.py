"""One stream's decoder: tokens in, text out as soon as it is certain.

Held back is only what a later token could still change: an incomplete UTF-8 sequence, and a tail that
is the beginning of a stop string.  Tokens are taken one at a time, so the text and the place of the stop
do not depend on how they were grouped into frames.  Work per token is bounded by the stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._utf8 = _utf8("replace")
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stop_string = ""  # the one that was met; the decoder takes no more after that

    def push(self, piece: bytes) -> str:
        """Take one token's bytes (b"" for a token that is not shown); returns text now certain."""
        text = self._utf8.decode(piece)
        return self._emit(text) if self._stop else text

    def finish(self) -> str:
        """What was held back; an unfinished sequence of bytes becomes U+FFFD."""
        text = self._utf8.decode(b"", True)
        if not self._stop:
            return text
        text = self._emit(text)
        if not self.stop_string:
            text, self._held = text + self._held, ""
        return text

    def _emit(self, new: str) -> str:
        text = self._held + new
        at, found = len(text), ""
        for stop in self._stop:
            where = text.find(stop)
            # The earliest wins; of two that begin together, the longer.
            if where >= 0 and (where < at or (where == at and len(stop) > len(found))):
                at, found = where, stop
        if found:
            self.stop_string, self._held = found, ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
