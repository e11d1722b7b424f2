"""The responses of POST /v1/completions: OpenAI's objects."""

from __future__ import annotations

from typing import Any

from pipeline.api.json_body import to_json
from stages.gateway.endpoints.openai_formatter import OpenAIFormatter
from stages.gateway.endpoints.prompt_logprobs import TOKENS_PER_EVENT, scored_prompt
from stages.gateway.endpoints.response_formatter import TextOffsets, finite_logprob, token_key
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes


class CompletionFormatter(OpenAIFormatter):
    """`text_completion`, streamed or whole."""

    ID_PREFIX = "cmpl-"
    WHOLE_OBJECT = EVENT_OBJECT = "text_completion"

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        super().__init__(request, vocabulary)
        self._offsets = [TextOffsets(len(self._echo(sequence))) for sequence in request.sequences]

    def opening_events(self) -> list[bytes]:
        """See `ResponseFormatter`. A prompt with logprobs has several events; the first one has its text."""
        generation = self._request.spec.generation
        if not (generation.echo and generation.logprobs):
            return super().opening_events()
        events = []
        for sequence in self._request.sequences:
            lists = self._echo_logprobs(sequence)
            for begin in range(0, len(lists["tokens"]), TOKENS_PER_EVENT):
                part = self._text_part(sequence, "" if begin else self._echo(sequence))
                logprobs = {name: values[begin : begin + TOKENS_PER_EVENT] for name, values in lists.items()}
                events.append(to_json(self._event(part, logprobs)))
        return events

    def _opening_part(self, sequence: SequenceState) -> dict[str, Any] | None:
        return self._text_part(sequence, self._echo(sequence)) if self._request.spec.generation.echo else None

    def _text_part(self, sequence: SequenceState, text: str) -> dict[str, Any]:
        return {"text": text, "index": sequence.index}

    def _finish_part(self, sequence: SequenceState) -> dict[str, Any]:
        return self._text_part(sequence, "")

    def _whole_part(self, sequence: SequenceState) -> dict[str, Any]:
        part = self._text_part(sequence, self._echo(sequence) + "".join(sequence.text))
        generation = self._request.spec.generation
        prompt = scored_prompt(self._request, sequence, self._vocabulary) if generation.shows_prompt_logprobs else None
        return part if prompt is None else {**part, "prompt_logprobs": prompt.vllm()}

    def _whole_logprobs(self, sequence: SequenceState) -> dict[str, Any]:
        if not self._request.spec.generation.echo:
            return self._logprobs(sequence, 0, sequence.n_emitted)
        echo, output = self._echo_logprobs(sequence), self._logprobs(sequence, 0, sequence.n_emitted)
        return {name: values + output[name] for name, values in echo.items()}

    def _echo_logprobs(self, sequence: SequenceState) -> dict[str, list[Any]]:
        prompt = scored_prompt(self._request, sequence, self._vocabulary)
        if prompt is None:
            return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        tokens, values, tops = prompt.openai(0, len(prompt), self._request.spec.generation.top_logprobs)
        offsets = prompt.offsets(self._echo(sequence))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _echo(self, sequence: SequenceState) -> str:
        return self._request.spec.echoes[sequence.spec.prompt_index] if self._request.spec.generation.echo else ""

    def _logprobs(self, sequence: SequenceState, begin: int, end: int) -> dict[str, Any]:
        """Return OpenAI's four parallel lists; a token that is not UTF-8 is named by its bytes."""
        end = min(end, len(sequence.logprobs))
        tokens, logprobs = sequence.tokens[begin:end], sequence.logprobs[begin:end]
        return {
            "tokens": [token_key(self._vocabulary.get(token)) for token in tokens],
            "token_logprobs": [finite_logprob(one.logprob) for one in logprobs],
            "top_logprobs": self._values.of(sequence, begin, end, self._token_value),
            "text_offset": [self._next_offset(sequence, token) for token in tokens],
        }

    def _token_value(self, sequence: SequenceState, at: int) -> dict[str, float]:
        logprob, vocabulary = sequence.logprobs[at], self._vocabulary
        top = {token_key(vocabulary.get(t)): finite_logprob(p) for t, p in logprob.top}
        return top | {token_key(vocabulary.get(sequence.tokens[at])): finite_logprob(logprob.logprob)}

    def skip(self, sequence: SequenceState, text: str, end: int, *, is_whole: bool) -> None:
        """See `ResponseFormatter`."""
        for token in sequence.tokens[:end] if sequence.logprobs else ():
            self._next_offset(sequence, token)

    def _next_offset(self, sequence: SequenceState, token: int) -> int:
        shown = self._vocabulary.shown(token, self._request.spec.generation.skip_special)
        return self._offsets[sequence.index].next(shown)
