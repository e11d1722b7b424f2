"""The decoder of one stream: tokens in, text out as soon as it is certain.

It holds back only what a later token can change: an incomplete UTF-8 sequence, and a tail that is the beginning of a
stop string. It takes one token at a time, so the text and the position of the stop do not depend on how tokens were
grouped into frames. The work for each token is bounded by the stop strings.

Reasoning before an answer is part of the text, with its marks; stop strings act on the answer alone. An answer that may
have one tool call ends with the token that completes it; the formatter leaves out what that token has behind the call.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pipeline.api.requests.reasoning_fields import Reasoning
from stages.gateway.reasoning.reasoning_parser import Kind, Part, ReasoningParser
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.tool_calls.call_parser import CallParser, parser_of

_utf8 = codecs.getincrementaldecoder("utf-8")


def decoder_of(spec: RequestSpec) -> StreamDecoder:
    """The decoder of each sequence of a request. With plugins calls are known only behind them: they end nothing."""
    generation, tools = spec.generation, spec.generation.tools
    calls = parser_of(tools) if tools and tools.is_single and not spec.plugins else None
    return StreamDecoder(generation.stop, generation.reasoning or None, calls)


class StreamDecoder:
    """Incremental detokenizer with stop strings."""

    def __init__(
        self, stop: Iterable[str] = (), reasoning: Reasoning | None = None, calls: CallParser | None = None
    ) -> None:
        """reasoning: the text may begin with it. calls: one that ends an answer with its first call."""
        self._utf8 = _utf8("replace")
        self._parser = ReasoningParser(reasoning) if reasoning is not None else None  # None: the answer has begun
        self.n_reasoning = 0  # tokens up to the end of the reasoning
        self._n_tokens = 0  # before the answer
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self._calls = calls
        self.stop_string = ""  # the stop string that was met
        self.is_over = False  # one was met, or the only call is complete: the decoder takes no more tokens

    def is_reasoning(self, *, is_whole: bool) -> bool:
        """The text so far ends within the reasoning; `is_whole`: and not within a character or what may be a mark."""
        parser = self._parser
        if parser is None or not parser.is_reasoning:
            return False
        return not is_whole or not (self._utf8.getstate()[0] or parser.may_be_ending)

    def push(self, token_bytes: bytes) -> str:
        """Take the bytes of one token (b"" if it is not shown). Returns the text that is now certain."""
        text = self._utf8.decode(token_bytes)
        if self._parser is not None:
            return self._push_reasoning(self._parser, text)
        return self._answer(text) if self._stop or self._calls is not None else text

    def finish(self) -> str:
        """The text that was held back; an incomplete UTF-8 sequence becomes U+FFFD."""
        text = self._utf8.decode(b"", True)
        if self._parser is not None:
            text = self._shown([*self._parser.feed(text), *self._parser.finish()])
            self._parser = None
        elif self._stop:
            text = self._release(text)
        if not self.stop_string:
            text, self._held = text + self._held, ""
        return text

    def _push_reasoning(self, parser: ReasoningParser, text: str) -> str:
        self._n_tokens += 1
        was_over = parser.n_marks == 2
        parts = parser.feed(text)
        if parser.n_marks and not was_over:
            self.n_reasoning = self._n_tokens
        if parser.is_answer:
            self._parser = None
        return self._shown(parts)

    def _shown(self, parts: list[Part]) -> str:
        return "".join(part.text if part.kind is not Kind.ANSWER else self._answer(part.text) for part in parts)

    def _answer(self, text: str) -> str:
        if self._stop:
            text = self._release(text)
        if self._calls is not None:
            self._calls.feed(text)
            self.is_over = self.is_over or self._calls.is_over
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
            self.stop_string, self._held, self.is_over = found, "", True
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
