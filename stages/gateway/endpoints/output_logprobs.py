"""Log probabilities of an answer, one JSON value for each output token, and answers that are large because of them.

A stream encodes those of a step as they come.  A whole answer, or a stream that is read again, has up to
`MAX_OUTPUT_LOGPROBS` at once: a second of work.  It is done in parts, between which other streams go on; beside a
thread they would not, because the encoder holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.api.json_body import to_json
from stages.gateway.endpoints.response_formatter import ResponseFormatter
from stages.gateway.requests.event_cursor import TOKENS, ChoiceCursor, EventCursor
from stages.gateway.requests.state import RequestState, SequenceState

VALUES_AT_ONCE = 512  # encoded before other streams get the event loop: about 1 ms

Make = Callable[[SequenceState, int], Any]  # from a sequence and an output index, the value for that token


class OutputLogprobs:
    """Those of one reader's answer. It is given a formatter's method each time: keeping it would make a cycle."""

    def __init__(self) -> None:
        self._ahead: dict[int, tuple[int, list[msgspec.Raw]]] = {}  # by sequence: index of the first token, and values

    async def prepare(self, sequence: SequenceState, begin: int, make: Make) -> None:
        """Encode the values from the output token `begin` on, for the next `of`. Gives up the event loop in between."""
        made: list[msgspec.Raw] = []
        self._ahead[sequence.index] = begin, made
        n_at_once = max(1, VALUES_AT_ONCE // (1 + max(0, sequence.spec.sampling.logprobs)))
        while (at := begin + len(made)) < (known := min(sequence.n_emitted, len(sequence.logprobs))):
            end = min(at + n_at_once, known)
            made += [msgspec.Raw(to_json(make(sequence, index))) for index in range(at, end)]
            await asyncio.sleep(0)

    def of(self, sequence: SequenceState, begin: int, end: int, make: Make) -> list[Any]:
        """Return the values of the output tokens [begin, end)."""
        end = min(end, len(sequence.logprobs))
        first, ahead = self._ahead.pop(sequence.index, (0, []))
        made: list[Any] = ahead[begin - first : end - first] if first <= begin else []
        return [*made, *(make(sequence, index) for index in range(begin + len(made), end))]


async def prepare_rest(formatter: ResponseFormatter, request: RequestState, cursor: EventCursor | None) -> None:
    """Encode what the events of a stream after `cursor` have; without one, all."""
    for sequence in request.sequences if request.spec.generation.logprobs else ():
        place = cursor.choices[sequence.index] if cursor is not None else ChoiceCursor(0)
        if place.level == TOKENS:
            await formatter.prepare(sequence, place.tokens)


async def whole_body(formatter: ResponseFormatter, request: RequestState) -> bytes:
    """Return the body of a response that is not streamed."""
    await prepare_rest(formatter, request, None)
    if request.scores:
        return await asyncio.to_thread(formatter.whole_response)
    return formatter.whole_response()
