"""A stream of an engine that promises no equal bytes: its text so far, from which another one of its kind can go on.

What was delivered is never repeated or taken back.  The last events (the reason of the end, the usage, `[DONE]`) are
delivered together: a stream whose engine dies between them goes on as if none of them had come.  A stream whose text is
not all of it (tool calls, log probabilities, several choices, JSON) ends with its engine: its door says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.api import output_text, sse
from pipeline.api.json_body import to_json
from pipeline.api.output_text import REPLAYED, TextSoFar
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.event_cutter import DONE, END, ERRORS, MAX_EVENT_BYTES, EventTooLargeError
from stages.orchestrator.upstream import Answer, Unreachable

MAX_REPLAYS = 4  # of a stream: text that kills engines must not kill one after the other


class TextStream:
    """The state of one stream, across engines."""

    def __init__(self) -> None:
        self.is_fixed = False  # no other engine can go on with it
        self.n_replays = 0
        self.n_events = 0
        self.is_over = False
        self.error = b""  # an error event, which was not forwarded
        self.problem = ""  # why what follows what `feed` has returned is no event of an answer
        self._tokens = self._named = 0
        self._text: list[str] = []
        self._n_bytes = 0
        self._rest = b""
        self._held: list[bytes] = []  # data of the last events

    @property
    def has_begun(self) -> bool:
        """Whether the client has an event."""
        return self.n_events > 0

    @property
    def tokens(self) -> int:
        """Output tokens that the client has, as engines count them."""
        return self._tokens

    @property
    def can_go_on(self) -> bool:
        """Whether another engine may go on from here."""
        is_bounded = self.n_replays < MAX_REPLAYS and self._n_bytes <= output_text.MAX_TEXT_BYTES
        return is_bounded and not self.is_fixed

    def restart(self) -> bytes:
        """Another engine goes on: what follows the body for it. b"": the request begins anew."""
        self._rest, self.error, self.problem, self._held, self._named = b"", b"", "", [], self._tokens
        if not self.has_begun:
            return b""
        return output_text.encode(TextSoFar(text="".join(self._text), tokens=self._tokens))

    def accepted(self, headers: Mapping[str, str]) -> bool:
        """The engine has begun to answer. Whether it goes on from another one's text."""
        self.is_fixed = headers.get(output_text.TEXT) == output_text.FIXED
        self.n_replays += self.has_begun
        return self.has_begun

    def feed(self, data: bytes) -> bytes:
        """The bytes to forward, all of which must be delivered. Raises `EventTooLargeError`, with nothing taken."""
        *blocks, self._rest = (self._rest + data).split(END)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return b"".join([self._take(block) for block in blocks if not (self.is_over or self.error or self.problem)])

    def _take(self, block: bytes) -> bytes:
        if block.startswith(output_text.COMMENT):
            self._named = output_text.read_comment(block) or self._named
            return b""
        if block.startswith(ERRORS):
            self.error = block + END
            return b""
        if block == DONE:
            self.is_over = True
            self.n_events += len(self._held) + 1
            self._tokens = max(self._tokens, self._named)
            return b"".join([sse.event(self._told(one)) for one in self._held]) + block + END
        if not block.startswith(b"data: "):
            return b""
        data = block[6:]
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
            choices = event.get("choices") or []
            if not choices or choices[0].get("finish_reason"):
                self._held.append(data)
                return b""
            text = choices[0]["delta"].get("content") if "delta" in choices[0] else choices[0]["text"]
        except (*DECODE_ERRORS, KeyError, TypeError, AttributeError, IndexError):
            self.problem = "the engine's door sends what is no event of an answer"
            return b""
        self._add(text or "")
        return block + END

    def _add(self, text: str) -> None:
        self.n_events += 1
        self._n_bytes += len(text.encode("utf-8", "surrogatepass"))
        self._tokens = max(self._tokens, self._named)
        if self.can_go_on:
            self._text.append(text)

    def _told(self, data: bytes) -> bytes:
        """A last event, which says how often the stream was replayed."""
        if not self.n_replays:
            return data
        return to_json({**msgspec.json.decode(data), REPLAYED: self.n_replays})


async def next_bytes(answer: Answer, stream: TextStream) -> bytes:
    """The next bytes of an answer; b"" at its end, and when its last event was delivered. Raises `Unreachable`."""
    try:
        data = await answer.read()
        while data and stream.is_over:
            data = await answer.read()
    except Unreachable:
        if not stream.is_over:
            raise
        return b""
    return data
