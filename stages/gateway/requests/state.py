"""The state of each request in flight: everything that is needed to continue it after any process has died.

A *request* is one HTTP call. It has one *sequence* for each prompt and choice. The state stores tokens as the
scheduler delivers them: after a crash of any stage, prompt + tokens so far is what the successor is sent.

    sequence:  PENDING --> DECODING --> FINISHED     the last token has become text, or a stop string was met
                  |            |
                  `------------'------> FAILED       an error; the request fails with it

    request:   OPEN --> FINISHED | FAILED | ABANDONED      exactly once, otherwise `IllegalTransitionError`

What a request asks for is in its frozen `RequestSpec`; the classes here hold only what changes.
"""

from __future__ import annotations

import enum
from array import array
from typing import Protocol

import msgspec

from pipeline.errors import StarlingError
from pipeline.observe.log_names import log_names
from pipeline.predicted_text import PredictionFollower
from pipeline.protocol.messages import Logprob, Submit
from stages.gateway.requests.prompt_scores import PromptScores
from stages.gateway.requests.spec import RequestSpec, ResponseKey, SequenceSpec
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.tracing.timeline import RequestTrace

NEVER = 1 << 60  # a number of tokens that no sequence reaches


class IllegalTransitionError(RuntimeError):
    """A bug of the gateway: a request or sequence ended twice."""


class SequencePhase(enum.Enum):
    """Where a sequence is in its life."""

    PENDING = "pending"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


class Outcome(enum.Enum):
    """How a request ended."""

    OPEN = "open"  # it has not ended
    FINISHED = "finished"
    FAILED = "failed"
    ABANDONED = "abandoned"  # the client disconnected: there is no terminal event to send


class Sink(Protocol):
    """Where the output of a request goes. The relay calls it, and calls `flush` once after each batch of calls."""

    def started(self) -> None:
        """The request has left the queue. May be called again after a recovery."""

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """`new` is the text that became certain with the output tokens [begin, end)."""

    def ended(self, sequence: SequenceState) -> None:
        """The sequence has its `finish_reason`."""

    def finished(self) -> None:
        """All sequences have ended. This is the request's terminal event."""

    def failed(self, error: StarlingError) -> None:
        """The request failed. This is the other terminal event."""

    def flush(self) -> None:
        """Send what the calls before produced."""


def finish(sink: Sink) -> None:
    """Send the terminal event of a whole answer."""
    sink.finished()
    sink.flush()


class Filter(Protocol):
    """The way of a sequence's text through plugins (`plugins/text_filter.py`)."""

    def advance(self, decoder: StreamDecoder, vocabulary: TokenBytes) -> None:
        """Decode the tokens that have no text yet."""

    def close(self) -> None:
        """The sequence has ended."""


class SequenceState:
    """Tokens of one sequence and their text. A plain class with slots, because it is touched for every token."""

    __slots__ = (
        "accepted",
        "attachment",
        "cached_tokens",
        "decoder",
        "filter",
        "finish_reason",
        "first_token_at",
        "follower",
        "id",
        "index",
        "is_flushed",
        "is_started",
        "is_submitted",
        "last_token_at",
        "logprobs",
        "n_emitted",
        "n_prompt",
        "n_reasoning",
        "n_resubmitted",
        "n_used",
        "not_before",
        "phase",
        "predicted",
        "reasoning_limit",
        "request",
        "revision",
        "scores",
        "spec",
        "started_at",
        "stop_string",
        "text",
        "text_ends",
        "text_length",
        "tokens",
    )

    def __init__(self, request: RequestState, index: int, spec: SequenceSpec) -> None:
        self.request = request  # deleted when the request ends, see `RequestState.end`
        self.spec = spec
        self.index = index  # in the response's `choices`
        self.id = f"{request.id}/{index}"
        self.n_prompt = len(request.spec.prompt_of(spec)) // 4
        self.phase = SequencePhase.PENDING
        # From the scheduler.
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []  # one for each token, if the client asked for them
        self.scores: PromptScores | None = None  # of the prompt, of the one sequence that computes them
        self.finish_reason = ""  # once set, no more tokens follow
        self.cached_tokens = 0  # prompt tokens that came from the KV cache
        self.accepted = 0  # draft tokens, once it has its finish reason
        self.attachment = 0  # of the worker group that computed its end, likewise; 0: not known
        self.first_token_at = 0.0  # s, monotonic; 0.0: no token yet
        self.last_token_at = 0.0  # of a token from the scheduler of this gateway's life; 0.0: none yet
        # Submission to the scheduler.
        self.is_submitted = False
        self.is_started = False  # the scheduler has taken it out of its queue and computes its prompt
        self.started_at = 0.0  # s, monotonic: when it first left the queue; 0.0: not yet, or before this gateway's life
        self.not_before = 0.0  # s, monotonic: earliest time of the next submission
        self.n_resubmitted = 0
        self.revision = 0  # of the tokens: grows when some that were computed are replaced by others
        # Text.
        self.decoder: StreamDecoder | None = None  # from the first token to the end of the sequence
        self.filter: Filter | None = None  # beside the decoder, if the text goes through plugins
        self.text_ends: array[int] | None = None  # then: characters of text at the end of each output token
        self.text: list[str] = []  # parts, to be joined
        self.text_length = 0  # characters
        self.is_flushed = False  # the text is complete
        self.n_emitted = 0  # output tokens whose text and logprobs have gone to the sink
        self.stop_string = ""
        self.n_used = 0  # output tokens that count: up to and including a stop token
        self.n_reasoning = 0  # of them, those of the reasoning before the answer, with its marks
        reasoning = request.spec.generation.reasoning
        # Output tokens after which its reasoning is ended.
        self.reasoning_limit = reasoning.budget if reasoning and reasoning.end_ids and reasoning.budget else NEVER
        # Of a request with a prediction: its tokens that came where they were expected, and the others.
        prediction = request.spec.prediction
        self.follower = PredictionFollower(prediction) if prediction else None
        self.predicted = (0, 0)

    @property
    def is_over(self) -> bool:
        """Has the sequence finished or failed?"""
        return self.phase is SequencePhase.FINISHED or self.phase is SequencePhase.FAILED

    @property
    def visible(self) -> int:
        """Number of tokens that are text. A stop token that ended the sequence is not."""
        if self.finish_reason == "stop" and self.tokens and self.tokens[-1] in self.spec.stop_ids:
            return len(self.tokens) - 1
        return len(self.tokens)

    def count_predicted(self) -> None:
        """Update `predicted` by the tokens that have become text."""
        if (follower := self.follower) is not None:
            follower.follow(self.tokens, 0, self.n_emitted)
            self.predicted = (follower.accepted, follower.rejected)

    def move(self, phase: SequencePhase) -> None:
        """Change the phase. Raises `IllegalTransitionError` if the sequence has ended."""
        if self.is_over or (phase is SequencePhase.PENDING):
            raise IllegalTransitionError(f"{self.id}: {self.phase.value} -> {phase.value}")
        self.phase = phase


class RequestState:
    """One HTTP call for text. `deadline` and `started_at` are seconds of the injected monotonic clock."""

    def __init__(self, spec: RequestSpec, deadline: float, started_at: float = 0.0) -> None:
        self.spec = spec
        self.deadline = deadline
        self.started_at = started_at
        self.sequences = [SequenceState(self, index, sequence) for index, sequence in enumerate(spec.sequences)]
        self.sink: Sink | None = None
        self.outcome = Outcome.OPEN
        self.error: StarlingError | None = None
        self.scores = self._prompt_scores()
        self.waits_for_scores = False  # no text goes to the sink before all prompts are scored
        self.update_scores()
        self.n_open = 0  # sequences that have not ended
        self.is_charged = False  # quotas were charged before: the answer is generated again for a reader
        self.is_probe = False  # of the self-test: not charged, counted or journaled
        self.is_recovered = False  # from the journal of the gateway's predecessor
        self.is_journaled = False  # a successor of this process finds it in the journal
        self.is_relayed = False  # its reader forwards the answer to a client: without one it waits for another reader
        self.response_cache = ""  # hit, miss or bypass; "": the cache is off
        self.response_key: ResponseKey | None = None  # to store the answer under
        self.trace: RequestTrace | None = None  # its timeline, if one is recorded
        self.longest_gap_s = 0.0  # between two output tokens of a sequence

    def _prompt_scores(self) -> dict[int, PromptScores]:
        """By index in `RequestSpec.prompts`; the first sequence of a prompt computes them. Empty: none are wanted."""
        top, scores = self.spec.generation.prompt_logprobs, dict[int, PromptScores]()
        if top is not msgspec.UNSET:
            for sequence in self.sequences:
                if sequence.spec.prompt not in scores:
                    sequence.scores = scores[sequence.spec.prompt] = PromptScores(top, sequence.n_prompt)
        return scores

    def update_scores(self) -> bool:
        """Call when scores have come. Returns whether all prompts are scored."""
        self.waits_for_scores = not all(scores.is_complete for scores in self.scores.values())
        return not self.waits_for_scores

    @property
    def id(self) -> str:
        """The public id, `req-HEX`."""
        return self.spec.id

    def place_on(self, version: str, tokenizer: str) -> None:
        """Continue on another loaded version of the same file, and so with the same answer."""
        self.spec = msgspec.structs.replace(self.spec, version=version, tokenizer=tokenizer)
        if self.trace is not None:
            self.trace.version = version

    def set_key(self, key: str, body_digest: bytes) -> None:
        """Set the idempotency key that the client sent; before the request starts."""
        self.spec = msgspec.structs.replace(self.spec, idempotency_key=key, body_digest=body_digest)

    def set_plugins(self, plugins: tuple[str, ...]) -> None:
        """Set the plugins that the text goes through; before the request starts."""
        self.spec = msgspec.structs.replace(self.spec, plugins=plugins)

    def allow_tokens(self, index: int, least: int) -> None:
        """Let a sequence that is not submitted have at least so many output tokens."""
        sequences = list(self.spec.sequences)
        sequences[index] = msgspec.structs.replace(sequences[index], max_tokens=max(sequences[index].max_tokens, least))
        self.spec = msgspec.structs.replace(self.spec, sequences=tuple(sequences))
        self.sequences[index].spec = sequences[index]

    def end(self, outcome: Outcome) -> None:
        """Set the outcome. Raises `IllegalTransitionError` if the request has ended.

        The sequences drop their reference to the request: a cycle would stay in memory until a collection.
        """
        if self.outcome is not Outcome.OPEN or outcome is Outcome.OPEN:
            raise IllegalTransitionError(f"{self.id}: {self.outcome.value} -> {outcome.value}")
        self.outcome = outcome
        for sequence in self.sequences:
            del sequence.request

    @property
    def session_id(self) -> str:
        """The session that it is a turn of; "": none."""
        turn = self.spec.generation.turn
        return turn.session if turn else ""

    @property
    def log_names(self) -> dict[str, str | None]:
        """What log lines name: the request, whose it is, and its model."""
        return log_names(self.id, self.spec.model, self.spec.tenant, self.session_id)

    @property
    def is_started(self) -> bool:
        """Have all sequences left the queue, so that no bound of a queue or of memory refuses the request?"""
        return all(s.is_started or s.tokens for s in self.sequences)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once, whatever the number of choices."""
        return sum(s.n_prompt for s in self.sequences if s.spec.choice == 0)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the KV cache."""
        return sum(s.cached_tokens for s in self.sequences if s.spec.choice == 0)

    @property
    def completion_tokens(self) -> int:
        """Output tokens that count, of all sequences."""
        return sum(s.n_used if s.is_over else len(s.tokens) for s in self.sequences)

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens that are reasoning, of all sequences."""
        return sum(s.n_reasoning for s in self.sequences)

    @property
    def predicted(self) -> tuple[int, int]:
        """Tokens of the prediction that came where they were expected, and the others; of all sequences."""
        return sum(s.predicted[0] for s in self.sequences), sum(s.predicted[1] for s in self.sequences)

    @property
    def first_token_at(self) -> float:
        """Time of the first token; 0.0 if there is none."""
        return min((s.first_token_at for s in self.sequences if s.first_token_at), default=0.0)


def submission(sequence: SequenceState, forced: bytes, now: float) -> Submit:
    """The frame that starts the sequence, or continues it after the tokens `forced` (i32 little-endian)."""
    request = sequence.request
    spec, generation = request.spec, request.spec.generation
    is_new = not (sequence.n_resubmitted or sequence.tokens)
    return Submit(
        sequence=sequence.id,
        request=request.id,
        model=spec.version,
        tenant=spec.tenant,
        prompt=spec.prompt_of(sequence.spec),
        max_tokens=sequence.spec.max_tokens,
        sampling=sequence.spec.sampling,
        choice=sequence.spec.choice,
        forced=forced,
        stop_ids=sequence.spec.stop_ids,
        deadline_ms=max(1, round((request.deadline - now) * 1000)),
        priority=spec.priority,
        cache_salt=generation.cache_salt,
        speculate=generation.speculate,
        constraint=generation.constraint or None,
        prompt_logprobs=sequence.scores.top if sequence.scores is not None else -1,
        scored=sequence.scores.known if sequence.scores is not None else 1,
        adapter=generation.adapter.digest if generation.adapter else "",
        prediction=spec.prediction if generation.speculate >= 0 else b"",
        revision=sequence.revision,
        session=request.session_id,
        following=len(request.sequences) - 1 - sequence.index if is_new else 0,
    )
