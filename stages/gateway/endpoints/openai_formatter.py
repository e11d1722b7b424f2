"""The response formatter of OpenAI's two text endpoints: everything but the form of a choice.

Most of an event is the same for all tokens of a sequence.  It is encoded once; each token adds only its text and
logprobs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pipeline.api.json_body import to_json
from stages.gateway.endpoints.output_logprobs import OutputLogprobs
from stages.gateway.endpoints.response_formatter import ResponseFormatter, usage
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes

_TEXT, _LOGPROBS = "\0text", "\0logprobs"  # placeholders in an encoded event; a NUL cannot stand in a field's name


class OpenAIFormatter(ResponseFormatter):
    """A `ResponseFormatter`; a subclass writes the part of a choice that has the text.

    Each `..._part` is the beginning of a choice object, before `logprobs` and `finish_reason`.
    """

    ID_PREFIX: str
    WHOLE_OBJECT: str  # `object` of a whole response
    EVENT_OBJECT: str  # and of an event

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._values = OutputLogprobs()
        self._header = {
            "id": f"{self.ID_PREFIX}{request.spec.hex}",
            "object": self.EVENT_OBJECT,
            "created": request.spec.created,
            "model": request.spec.shown_model,
            "system_fingerprint": request.spec.fingerprint,
        }
        # With include_usage every event but the last has a usage of null.
        self._trailer = {"usage": None} if request.spec.generation.include_usage else {}
        self._text_events = [
            _split(self._event(self._text_part(s, _TEXT), _LOGPROBS), _TEXT, _LOGPROBS) for s in request.sequences
        ]

    @abstractmethod
    def _opening_part(self, sequence: SequenceState) -> dict[str, Any] | None:
        """Return the choice before the first text; None: there is no such event."""

    @abstractmethod
    def _text_part(self, sequence: SequenceState, text: str) -> dict[str, Any]:
        """Return the choice with new text."""

    @abstractmethod
    def _finish_part(self, sequence: SequenceState) -> dict[str, Any]:
        """Return the choice that comes with the finish reason."""

    @abstractmethod
    def _whole_part(self, sequence: SequenceState) -> dict[str, Any]:
        """Return the choice of a whole response."""

    @abstractmethod
    def _logprobs(self, sequence: SequenceState, begin: int, end: int) -> Any:
        """Return the `logprobs` of the output tokens [begin, end)."""

    @abstractmethod
    def _token_value(self, sequence: SequenceState, at: int) -> Any:
        """Return what `_logprobs` has for the alternatives to one output token."""

    def _whole_logprobs(self, sequence: SequenceState) -> Any:
        """Return the `logprobs` of a choice of a whole response."""
        return self._logprobs(sequence, 0, sequence.n_emitted)

    def _whole_extra(self) -> dict[str, Any]:
        """Return more fields of a whole response."""
        return {}

    def _finish_reason(self, sequence: SequenceState) -> str:
        return sequence.finish_reason

    async def prepare(self, sequence: SequenceState, begin: int) -> None:
        """See `ResponseFormatter`."""
        await self._values.prepare(sequence, begin, self._token_value)

    def opening_events(self) -> list[bytes]:
        """See `ResponseFormatter`."""
        parts = (self._opening_part(sequence) for sequence in self._request.sequences)
        return [to_json(self._event(part)) for part in parts if part is not None]

    def text_event(self, sequence: SequenceState, new: str, begin: int, end: int) -> bytes | None:
        """See `ResponseFormatter`. Without logprobs an event needs text; with them, text or a token."""
        if sequence.logprobs:
            if not new and begin == end:
                return None
            logprobs = to_json(self._logprobs(sequence, begin, end))
        else:
            if not new:
                return None
            logprobs = b"null"
        before, between, after = self._text_events[sequence.index]
        return b"%b%b%b%b%b" % (before, to_json(new), between, logprobs, after)

    def finish_event(self, sequence: SequenceState) -> bytes:
        """See `ResponseFormatter`."""
        event = self._event(self._finish_part(sequence), finish=self._finish_reason(sequence))
        return to_json({**event, "seed": self._request.spec.seed})

    def closing_events(self) -> list[bytes]:
        """See `ResponseFormatter`. With include_usage one event has the usage and no choices."""
        if not self._request.spec.generation.include_usage:
            return []
        return [to_json({**self._header, "choices": [], "usage": usage(self._request)})]

    def whole_response(self) -> bytes:
        """See `ResponseFormatter`."""
        request = self._request
        choices = [
            {
                **self._whole_part(s),
                "index": index,
                "logprobs": self._whole_logprobs(s) if request.spec.generation.logprobs else None,
                "finish_reason": self._finish_reason(s),
            }
            for index, s in enumerate(best_sequences(request))
        ]
        header = {**self._header, "object": self.WHOLE_OBJECT, "seed": request.spec.seed}
        return to_json({**header, "choices": choices, "usage": usage(request), **self._whole_extra()})

    def _event(self, part: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        choice = {**part, "logprobs": logprobs, "finish_reason": finish}
        return {**self._header, "choices": [choice], **self._trailer}


def best_sequences(request: RequestState) -> list[SequenceState]:
    """Return the sequences of the answer: of each prompt those with the highest log probability per token."""
    n = request.spec.generation.n_returned
    if not n:
        return request.sequences
    chosen: list[SequenceState] = []
    for prompt in dict.fromkeys(s.spec.prompt_index for s in request.sequences):
        ranked = sorted((s for s in request.sequences if s.spec.prompt_index == prompt), key=_rank)
        chosen += ranked[:n]
    return chosen


def _rank(sequence: SequenceState) -> tuple[float, int]:
    """Order of choices, the best one first."""
    logprobs = [one.logprob for one in sequence.logprobs[: sequence.n_used]]
    return -sum(logprobs) / len(logprobs) if logprobs else 0.0, sequence.index


def _split(template: Any, *placeholders: str) -> list[bytes]:
    """Return `template` as JSON, cut at each placeholder string, in their order."""
    rest, parts = to_json(template), []
    for placeholder in placeholders:
        before, found, rest = rest.partition(to_json(placeholder))
        if not found:
            raise ValueError(f"{placeholder!r} is not in the template")
        parts.append(before)
    return [*parts, rest]
