"""The responses of POST /v1/chat/completions: OpenAI's objects, without tool calls and reasoning."""

from __future__ import annotations

from typing import Any

from stages.gateway.endpoints.openai_formatter import OpenAIFormatter
from stages.gateway.endpoints.prompt_logprobs import scored_prompt
from stages.gateway.endpoints.response_formatter import finite_logprob, token_text
from stages.gateway.requests.state import SequenceState


class ChatFormatter(OpenAIFormatter):
    """`chat.completion` and `chat.completion.chunk`."""

    ID_PREFIX = "chatcmpl-"
    WHOLE_OBJECT = "chat.completion"
    EVENT_OBJECT = "chat.completion.chunk"

    def _opening_part(self, sequence: SequenceState) -> dict[str, Any]:
        return {"index": sequence.index, "delta": {"role": "assistant", "content": "", "refusal": None}}

    def _text_part(self, sequence: SequenceState, text: str) -> dict[str, Any]:
        return {"index": sequence.index, "delta": {"content": text}}

    def _finish_part(self, sequence: SequenceState) -> dict[str, Any]:
        return {"index": sequence.index, "delta": {}}

    def _whole_part(self, sequence: SequenceState) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(sequence.text), "refusal": None}
        return {"index": sequence.index, "message": message}

    def _whole_extra(self) -> dict[str, Any]:
        prompt = scored_prompt(self._request, self._request.sequences[0], self._vocabulary)
        return {} if prompt is None else {"prompt_logprobs": prompt.vllm()}

    def _logprobs(self, sequence: SequenceState, begin: int, end: int) -> dict[str, Any]:
        return {"content": self._values.of(sequence, begin, end, self._token_value), "refusal": None}

    def _token_value(self, sequence: SequenceState, at: int) -> dict[str, Any]:
        logprob = sequence.logprobs[at]
        entry = self._token_logprob(sequence.tokens[at], logprob.logprob)
        top = logprob.top[: self._request.spec.generation.top_logprobs]
        return {**entry, "top_logprobs": [self._token_logprob(t, p) for t, p in top]}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._vocabulary.get(token)
        return {"token": token_text(piece), "logprob": finite_logprob(logprob), "bytes": list(piece)}
