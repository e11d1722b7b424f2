"""One request of an in-process engine: its tokens, the text made of them, and what a caller sees of it."""

from __future__ import annotations

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import StarlingError
from pipeline.protocol.messages import Logprob, SequenceTokens, Submit
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.tokenizer.service import TokenizerModel


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has produced so far.

    `text` only grows: characters that a later token could still change are left out until it is known.
    """

    id: str
    text: str
    tokens: tuple[int, ...]  # a stop token that ended the request is left out
    logprobs: tuple[Logprob, ...]  # one for each token, when `logprobs` was given
    finish_reason: str  # "" while it runs; "stop", "length", "cancelled", "error"
    stop_string: str  # the one that ended it, or ""
    seed: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt: computed for an earlier request
    error: StarlingError | None  # with finish_reason "error"

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return bool(self.finish_reason)


class LocalRequest:
    """A submitted request and the text made of its tokens."""

    def __init__(self, frame: Submit, parsed: GenerationRequest, model: TokenizerModel) -> None:
        self.id = frame.request
        self.sequence = frame.sequence
        self.seed = frame.sampling.seed
        self.prompt_tokens = len(frame.prompt) // 4
        self.cached_tokens = 0
        self.finish_reason = ""
        self.error: StarlingError | None = None
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._text: list[str] = []
        self._end = 0  # tokens whose text is in `_text`
        self._stop_ids = frozenset(frame.stop_ids)
        self._decoder = StreamDecoder(parsed.stop)
        self._vocabulary = model.vocabulary
        self._hidden = model.vocabulary.control if parsed.skip_special else frozenset()

    def take(self, new: SequenceTokens) -> bool:
        """Add tokens from the scheduler. Returns True when a stop string has ended the request before its sequence."""
        if self.finish_reason:
            return False
        self._tokens.extend(new.tokens)
        self._logprobs.extend(new.logprobs)
        self.cached_tokens = new.cached_tokens or self.cached_tokens
        if new.error:
            self.fail(StarlingError(new.error, new.message))
            return False
        is_stop_token = new.finish == "stop" and bool(self._tokens) and self._tokens[-1] in self._stop_ids
        visible = len(self._tokens) - is_stop_token
        decoder = self._decoder
        while self._end < visible and not decoder.stop_string:
            token = self._tokens[self._end]
            self._text.append(decoder.push(b"" if token in self._hidden else self._vocabulary.token_bytes(token)))
            self._end += 1
        if new.finish and not decoder.stop_string:
            self._text.append(decoder.finish())
        self.finish_reason = "stop" if decoder.stop_string else new.finish
        return bool(decoder.stop_string) and not new.finish

    def fail(self, error: StarlingError) -> None:
        """End the request with an error."""
        self.error, self.finish_reason = error, "error"

    @property
    def used(self) -> int:
        """Output tokens up to the end of the text."""
        return self._end

    def snapshot(self) -> Generation:
        """The request as `Embedded.poll` shows it."""
        self._text = ["".join(self._text)]
        return Generation(
            id=self.id,
            text=self._text[0],
            tokens=tuple(self._tokens[: self._end]),
            logprobs=tuple(self._logprobs[: self._end]),
            finish_reason=self.finish_reason,
            stop_string=self._decoder.stop_string,
            seed=self.seed,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            error=self.error,
        )
