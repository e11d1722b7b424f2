"""The record of each request in flight: all that is needed to begin it again anywhere.

A *request* is one HTTP call; it has a *sequence* for each prompt and choice.  Tokens are kept as the
scheduler delivers them: whoever dies, prompt + tokens so far is what its successor is sent.

    sequence:  PENDING --> DECODING --> FINISHED     scheduler's last token has become text, or a stop
                  |            |                     string was met
                  `------------'------> FAILED       an error; the request fails with it

    request:   OPEN --> FINISHED | FAILED | ABANDONED      exactly once: `IllegalTransitionError` otherwise
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from pipeline.errors import StarlingError
from pipeline.protocol.messages import Logprob, Sampling, Submit

if TYPE_CHECKING:
    from stages.gateway.endpoints.generation_request import GenerationRequest
    from stages.gateway.requests.response_cache import ResponseKey
    from stages.gateway.requests.text_decoder import StreamDecoder


class IllegalTransitionError(RuntimeError):
    """A fault of the gateway: a request or sequence ends twice."""


class SequencePhase(enum.Enum):
    PENDING = "pending"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


class Outcome(enum.Enum):
    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    ABANDONED = "abandoned"  # the client has gone: nobody is told


class Sink(Protocol):
    """Where a request's output goes. Called by the relay; `flush` once after each batch of calls."""

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """`new` text has become certain with the output tokens [begin, end)."""

    def ended(self, sequence: SequenceState) -> None:
        """The sequence has its `finish`."""

    def finished(self) -> None:
        """All sequences have ended: the request's terminal event."""

    def failed(self, error: StarlingError) -> None:
        """The other terminal event."""

    def flush(self) -> None: ...


class SequenceState:
    """One line of tokens and the text made of it. Plain attributes: touched for every token."""

    __slots__ = (
        "begun_at",
        "cached_tokens",
        "choice",
        "decoder",
        "end",
        "finish",
        "id",
        "index",
        "is_flushed",
        "is_submitted",
        "logprobs",
        "max_tokens",
        "n_prompt",
        "not_before",
        "prompt",
        "prompt_index",
        "request",
        "resubmitted",
        "sampling",
        "state",
        "stop_ids",
        "stop_string",
        "text",
        "text_length",
        "tokens",
        "used",
    )

    def __init__(
        self,
        request: RequestState,
        index: int,
        prompt_index: int,
        choice: int,
        prompt: bytes,
        max_tokens: int,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
    ) -> None:
        self.request = request  # until its end: see `RequestState.end`
        self.index = index  # in the response's `choices`
        self.prompt_index = prompt_index
        self.choice = choice  # of its prompt: part of what the sampler draws from
        self.id = f"{request.id}/{index}"
        self.prompt = prompt  # i32 little-endian
        self.n_prompt = len(prompt) // 4
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.state = SequencePhase.PENDING
        # From the scheduler.
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []  # one for each token, when asked for
        self.finish = ""  # its finish reason: no more tokens will come
        self.cached_tokens = 0
        self.is_submitted = False
        self.not_before = 0.0  # do not submit again earlier
        self.resubmitted = 0  # how often
        self.begun_at = 0.0  # first token
        # What has become of them.
        self.decoder: StreamDecoder | None = None  # from its first token to its end
        self.text: list[str] = []  # to be joined
        self.text_length = 0  # characters
        self.is_flushed = False  # that is all of its text
        self.end = 0  # output tokens whose text (and logprobs) have gone to the sink
        self.stop_string = ""
        self.used = 0  # output tokens that count: up to and including a stop

    @property
    def is_over(self) -> bool:
        return self.state is SequencePhase.FINISHED or self.state is SequencePhase.FAILED

    @property
    def visible(self) -> int:
        """Tokens that are text: a stop token that ended the sequence is none."""
        if self.finish == "stop" and self.tokens and self.tokens[-1] in self.stop_ids:
            return len(self.tokens) - 1
        return len(self.tokens)

    def move(self, state: SequencePhase) -> None:
        if self.is_over or (state is SequencePhase.PENDING):
            raise IllegalTransitionError(f"{self.id}: {self.state.value} -> {state.value}")
        self.state = state


class RequestState:
    """One HTTP call for text. `deadline` is of the injected monotonic clock, in seconds."""

    def __init__(
        self,
        id: str,
        ask: GenerationRequest,
        model: str,
        tenant: str,
        deadline: float,
        *,
        priority: int = 0,
        created: int = 0,
        fingerprint: str = "",
        started_at: float = 0.0,
        client_id: str = "",
        instance: str = "",
    ) -> None:
        self.id = id
        self.ask = ask
        self.model = model
        self.instance = instance or model  # the version of it that it began on, and ends on
        self.tenant = tenant
        self.deadline = deadline
        self.priority = priority
        self.created = created  # s since 1970
        self.fingerprint = fingerprint
        self.started_at = started_at
        self.client_id = client_id or id  # X-Request-Id
        self.seed = 0
        self.sequences: list[SequenceState] = []
        self.echoes: list[str] = []  # with `echo`: each prompt's text
        self.sink: Sink | None = None
        self.outcome = Outcome.OPEN
        self.error: StarlingError | None = None
        self.left = 0  # sequences that have not ended
        self.is_charged = False  # its tokens have been counted before: it is generated again for a reader
        self.tokenizer = ""  # digest of the tokenizer that its tokens are of
        self.is_probe = False  # the server's own, see selftest.py: nobody's quota, nobody's metrics
        self.is_recovered = False  # by a gateway that did not take it in: see recovery.py
        self.response_cache = ""  # hit, miss or bypass; "": there is none. See responses.py
        self.response_key: ResponseKey | None = None  # under which its answer is to be kept

    @property
    def hex(self) -> str:
        """The id without its prefix, for the ids of OpenAI's objects."""
        return self.id.removeprefix("req-")

    def end(self, outcome: Outcome) -> None:
        """Raises `IllegalTransitionError` when it has ended already.

        Its sequences have no `request` any more: what refers to each other would stay in memory until a collection.
        """
        if self.outcome is not Outcome.OPEN or outcome is Outcome.OPEN:
            raise IllegalTransitionError(f"{self.id}: {self.outcome.value} -> {outcome.value}")
        self.outcome = outcome
        for sequence in self.sequences:
            del sequence.request

    @property
    def vocabulary(self) -> str:
        """What its token ids are of: versions of a model may share one."""
        return self.tokenizer or self.instance

    @property
    def prompt_tokens(self) -> int:
        return sum(s.n_prompt for s in self.sequences if s.choice == 0)

    @property
    def cached_tokens(self) -> int:
        return sum(s.cached_tokens for s in self.sequences if s.choice == 0)

    @property
    def first_token_at(self) -> float:
        """When its first token came; 0.0 when there is none."""
        return min((s.begun_at for s in self.sequences if s.begun_at), default=0.0)

    @property
    def completion_tokens(self) -> int:
        return sum(s.used if s.is_over else len(s.tokens) for s in self.sequences)


def submission(sequence: SequenceState, forced: bytes, now: float) -> Submit:
    """The frame that begins the sequence, or begins it again after `forced` (i32 little-endian)."""
    request = sequence.request
    return Submit(
        sequence=sequence.id,
        request=request.id,
        model=request.instance,
        tenant=request.tenant,
        prompt=sequence.prompt,
        max_tokens=sequence.max_tokens,
        sampling=sequence.sampling,
        choice=sequence.choice,
        forced=forced,
        stop_ids=sequence.stop_ids,
        deadline_ms=max(1, round((request.deadline - now) * 1000)),
        priority=request.priority,
        cache_salt=request.ask.cache_salt,
        speculate=request.ask.speculate,
    )
