"""The decoder of one stream: tokens in, text out as soon as it is certain.

It holds back only what a later token can change: an incomplete UTF-8 sequence, and a tail that is the beginning of a
stop string. It takes one token at a time, so the text and the position of the stop do not depend on how tokens were
grouped into frames. The work for each token is bounded by the stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

_utf8 = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """Incremental detokenizer with stop strings."""

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self._utf8 = _utf8("replace")
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stop_string = ""  # the stop string that was met; after that the decoder takes no more tokens

    def push(self, token_bytes: bytes) -> str:
        """Take the bytes of one token (b"" if it is not shown). Returns the text that is now certain."""
        text = self._utf8.decode(token_bytes)
        return self._release(text) if self._stop else text

    def finish(self) -> str:
        """The text that was held back; an incomplete UTF-8 sequence becomes U+FFFD."""
        text = self._utf8.decode(b"", True)
        if not self._stop:
            return text
        text = self._release(text)
        if not self.stop_string:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        at, found = len(text), ""
        for stop in self._stop:
            where = text.find(stop)
            # The earliest stop string wins; of two that begin at the same place, the longer one.
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
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
