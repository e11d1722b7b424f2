"""One request of an in-process engine: its tokens, the text made of them, and what a caller sees of it.

Not thread-safe: `starling.embedded` calls it under the engine's lock, except `LocalRequest.call_back`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import StarlingError
from pipeline.protocol.messages import Logprob, SequenceTokens, Submit
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.scheduler.core.sequence import SequenceState
from stages.tokenizer.service import TokenizerModel


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has produced so far.

    `text` only grows: characters that a later token could still change are left out until it is known.
    """

    id: str
    state: str  # "pending", "prefilling", "decoding"; ended: "finished", or "failed" with an error
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


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step has added to a request: the argument of `on_token`.

    All deltas of a request, joined, are its `text`, `tokens` and `logprobs`.
    """

    id: str
    text: str  # may be "" although there are tokens, or have characters of earlier ones
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: str  # as in `Generation`: "" in all deltas but the last one


class LocalRequest:
    """A submitted request and the text made of its tokens."""

    def __init__(
        self,
        frame: Submit,
        parsed: GenerationRequest,
        model: TokenizerModel,
        now: float,
        on_token: Callable[[Delta], object] | None,
    ) -> None:
        """`now`: when it is submitted, s."""
        self.id = frame.request
        self.sequence = frame.sequence
        self.seed = frame.sampling.seed
        self.prompt_tokens = len(frame.prompt) // 4
        self.cached_tokens = 0
        self.finish_reason = ""
        self.error: StarlingError | None = None
        self.scheduled: SequenceState | None = None  # in the scheduler, while it runs
        self.submitted_at = now
        self.first_token_at = 0.0  # s; 0.0: it has no token
        self.on_token = on_token
        self.deltas: deque[Delta] = deque()  # for calls that are not over, the oldest first
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._text: list[str] = []
        self._end = 0  # tokens whose text is in `_text`
        self._stop_ids = frozenset(frame.stop_ids)
        self._decoder = StreamDecoder(parsed.stop)
        self._vocabulary = model.vocabulary
        self._hidden = model.vocabulary.control if parsed.skip_special else frozenset()

    def take(self, new: SequenceTokens, now: float) -> bool:
        """Add tokens of a running request from the scheduler.

        Returns True when a stop string has ended the request before its sequence.
        """
        if new.tokens and not self._tokens:
            self.first_token_at = now
        self._tokens.extend(new.tokens)
        self._logprobs.extend(new.logprobs)
        self.cached_tokens = new.cached_tokens or self.cached_tokens
        if new.error:
            self.fail(StarlingError(new.error, new.message))
            return False
        is_stop_token = new.finish == "stop" and bool(self._tokens) and self._tokens[-1] in self._stop_ids
        visible = len(self._tokens) - is_stop_token
        decoder, start = self._decoder, self._end
        pieces: list[str] = []
        while self._end < visible and not decoder.stop_string:
            token = self._tokens[self._end]
            pieces.append(decoder.push(b"" if token in self._hidden else self._vocabulary.token_bytes(token)))
            self._end += 1
        if new.finish and not decoder.stop_string:
            pieces.append(decoder.finish())
        self._text += pieces
        self.finish_reason = "stop" if decoder.stop_string else new.finish
        self._emit(start, "".join(pieces))
        return bool(decoder.stop_string) and not new.finish

    def fail(self, error: StarlingError) -> None:
        """End the request with an error."""
        self.error, self.finish_reason = error, "error"
        self._emit(self._end, "")

    def _emit(self, start: int, text: str) -> None:
        if self.on_token is not None and (self._end > start or text or self.finish_reason):
            self.deltas.append(
                Delta(
                    id=self.id,
                    text=text,
                    tokens=tuple(self._tokens[start : self._end]),
                    logprobs=tuple(self._logprobs[start : self._end]),
                    finish_reason=self.finish_reason,
                )
            )

    def call_back(self) -> None:
        """Call `on_token` with the oldest delta, if there is one. Raises what it raises."""
        if not self.deltas:
            return
        try:
            if self.on_token is not None:
                self.on_token(self.deltas[0])
        finally:
            self.deltas.popleft()

    @property
    def is_over(self) -> bool:
        """It has ended, and its last call of `on_token` has returned."""
        return bool(self.finish_reason) and not self.deltas

    @property
    def used(self) -> int:
        """Output tokens up to the end of the text."""
        return self._end

    @property
    def outputs(self) -> int:
        """Output tokens, with those that the text leaves out."""
        return len(self._tokens)

    @property
    def state(self) -> str:
        """As in `Generation`."""
        if self.finish_reason:
            return "failed" if self.error is not None else "finished"
        return self.scheduled.phase.value if self.scheduled is not None else "pending"

    def snapshot(self) -> Generation:
        """The request as `Embedded.poll` shows it."""
        self._text = ["".join(self._text)]
        return Generation(
            id=self.id,
            state=self.state,
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
