"""What a model's text consists of: reasoning, then text and tool calls. Formatters of chats make events of these.

`AnswerParser` is a function of the text so far, as its two parts are (`reasoning/reasoning_parser.py`,
`tool_calls/call_parser.py`), so a resumed stream has the same items.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.requests.reasoning_fields import Reasoning
from stages.gateway.reasoning.reasoning_parser import Kind, Part, ReasoningParser
from stages.gateway.tool_calls.call_parser import CallParser, Item, Text, parser_of


class ReasoningText(NamedTuple):
    """More of the reasoning."""

    text: str


AnswerItem = ReasoningText | Item


def make_parser(generation: GenerationRequest) -> AnswerParser | None:
    """Return a parser for one sequence; None: all of its text is the answer."""
    tools, reasoning = generation.tools, generation.reasoning
    if not tools and not reasoning:
        return None
    return AnswerParser(reasoning or None, parser_of(tools) if tools else None)


class AnswerParser:
    """Parses one text."""

    def __init__(self, reasoning: Reasoning | None, calls: CallParser | None) -> None:
        self._reasoning = ReasoningParser(reasoning) if reasoning is not None else None
        self._shows_reasoning = reasoning is not None and reasoning.is_shown
        self._calls = calls

    def feed(self, text: str) -> list[AnswerItem]:
        """Return what has become certain with more of the text."""
        if self._reasoning is None:
            return self._answer(text)
        items = self._divided(self._reasoning.feed(text))
        if self._reasoning.is_answer:
            self._reasoning = None
        return items

    def finish(self) -> list[AnswerItem]:
        """Return what was held back. The text has ended."""
        items = self._divided(self._reasoning.finish()) if self._reasoning is not None else []
        self._reasoning = None
        return [*items, *self._calls.finish()] if self._calls is not None else items

    def _divided(self, parts: list[Part]) -> list[AnswerItem]:
        items: list[AnswerItem] = []
        for part in parts:
            if part.kind is Kind.ANSWER:
                items += self._answer(part.text)
            elif part.kind is Kind.REASONING and self._shows_reasoning:
                items.append(ReasoningText(part.text))
        return items

    def _answer(self, text: str) -> list[AnswerItem]:
        if self._calls is None:
            return [Text(text)] if text else []
        return [*self._calls.feed(text)]
