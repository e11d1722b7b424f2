"""The responses of POST /v1/generate, the server's own endpoint.

Response:
    {"id": "req-...", "object": "generation", "created": 1, "model": "...", "seed": 7,
     "choices": [{"index": 0, "text": "...", "tokens": [ids], "finish_reason": "stop" | "length",
                  "stop_string": "..." | null, "logprobs": [...] | null,
                  "prompt_logprobs": [...]}],      with that parameter
     "session_id": "...",                if the request has a session
     "usage": {...}}

Stream:
    {"index", "prompt_logprobs", "start"}                with prompt_logprobs, for each 256 tokens of each prompt
    {"index", "text", "tokens", "start", "logprobs"?}    for each piece of text; start: output index of its first token
    {"index", "finish_reason", "stop_string"}            for each choice
    {"id", "object", "created", "model", "seed", "session_id"?, "usage"}
    [DONE]
"""

from __future__ import annotations

from typing import Any

from pipeline.api.json_body import to_json
from stages.gateway.endpoints.output_logprobs import OutputLogprobs
from stages.gateway.endpoints.prompt_logprobs import scored_prompt
from stages.gateway.endpoints.response_formatter import ResponseFormatter, finite_logprob, token_text, usage
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes


class GenerateFormatter(ResponseFormatter):
    """Writes the response that the module's docstring describes."""

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._values = OutputLogprobs()
        self._shows_tokens = not request.spec.plugins  # whose text is not what the client gets
        self._header = {
            "id": request.id,
            "object": "generation",
            "created": request.spec.created,
            "model": request.spec.shown_model,
            "seed": request.spec.seed,
        }
        if request.spec.generation.turn is not None:
            self._header["session_id"] = request.spec.generation.turn.session

    async def prepare(self, sequence: SequenceState, begin: int) -> None:
        """See `ResponseFormatter`."""
        await self._values.prepare(sequence, begin, self._token_value)

    def opening_events(self) -> list[bytes]:
        """See `ResponseFormatter`. With `prompt_logprobs` they have the prompts."""
        events = []
        for sequence in self._request.sequences:
            prompt = scored_prompt(self._request, sequence, self._vocabulary)
            if prompt is None:
                continue
            for begin, end in prompt.spans():
                part = {"index": sequence.index, "prompt_logprobs": prompt.entries(begin, end), "start": begin}
                events.append(to_json(part))
        return events

    def text_event(self, sequence: SequenceState, new: str, begin: int, end: int) -> bytes | None:
        """See `ResponseFormatter`."""
        if not new and begin == end:
            return None
        event: dict[str, Any] = {
            "index": sequence.index,
            "text": new,
            "tokens": sequence.tokens[begin:end] if self._shows_tokens else [],
            "start": begin,
        }
        if sequence.logprobs:
            event["logprobs"] = self._values.of(sequence, begin, end, self._token_value)
        return to_json(event)

    def finish_event(self, sequence: SequenceState) -> bytes:
        """See `ResponseFormatter`."""
        return to_json(
            {
                "index": sequence.index,
                "finish_reason": sequence.finish_reason,
                "stop_string": sequence.stop_string or None,
            }
        )

    def closing_events(self) -> list[bytes]:
        """See `ResponseFormatter`."""
        return [to_json({**self._header, "usage": usage(self._request)})]

    def whole_response(self) -> bytes:
        """See `ResponseFormatter`."""
        request = self._request
        choices = [
            {
                "index": s.index,
                "text": "".join(s.text),
                "tokens": s.tokens[: s.n_emitted] if self._shows_tokens else [],
                "finish_reason": s.finish_reason,
                "stop_string": s.stop_string or None,
                "logprobs": self._values.of(s, 0, s.n_emitted, self._token_value)
                if request.spec.generation.logprobs
                else None,
                **self._prompt_part(s),
            }
            for s in request.sequences
        ]
        return to_json({**self._header, "choices": choices, "usage": usage(request)})

    def _prompt_part(self, sequence: SequenceState) -> dict[str, Any]:
        prompt = scored_prompt(self._request, sequence, self._vocabulary)
        return {} if prompt is None else {"prompt_logprobs": prompt.entries(0, len(prompt))}

    def _token_value(self, sequence: SequenceState, at: int) -> dict[str, Any]:
        logprob = sequence.logprobs[at]
        entry = self._token_logprob(sequence.tokens[at], logprob.logprob)
        return {**entry, "top": [self._token_logprob(t, p) for t, p in logprob.top]}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._vocabulary.get(token)
        return {"id": token, "token": token_text(piece), "bytes": list(piece), "logprob": finite_logprob(logprob)}
