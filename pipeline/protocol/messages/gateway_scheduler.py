"""Frames between gateway and scheduler: sequences to be generated, and their tokens."""

from __future__ import annotations

from pipeline.protocol.messages.frame import Frame, Heartbeat, Hello
from pipeline.protocol.messages.generation import Constraint, Sampling


def request_of(sequence: str) -> str:
    """The id of the request that a sequence belongs to."""
    return sequence.rpartition("/")[0]


class Submit(Frame, tag="S"):
    """One sequence to be generated.

    `forced` are output tokens that were delivered before a recovery: they are computed like prompt
    tokens and count as output (sampling positions, penalties, limits).
    """

    sequence: str
    request: str
    model: str
    tenant: str
    prompt: bytes  # int32 little-endian token ids
    max_tokens: int  # output tokens, forced ones included; 0: with `prompt_logprobs`, or nothing is computed
    sampling: Sampling
    choice: int = 0
    forced: bytes = b""  # int32 little-endian
    stop_ids: tuple[int, ...] = ()
    deadline_ms: int = 0  # remaining time of the request when sent; 0: no deadline
    priority: int = 0
    cache_salt: str = ""
    speculate: int = 0  # maximum draft tokens in a step; 0: as configured, -1: none
    constraint: Constraint | None = None
    pooling: str = ""  # one of POOLINGS: `Pooled` answers, and no token is generated; max_tokens is 1
    breakers: bytes = b""  # with `dry_multiplier`: u32 little-endian, a bit for each token that breaks repetitions
    prompt_logprobs: int = (
        -1
    )  # n: the prompt's tokens are scored, with the n highest log probabilities; -1: they are not
    scored: int = 1  # leading tokens of the prompt whose scores the gateway has, or that have none: the first one
    adapter: str = ""  # digest (hex) of the LoRA adapter that computes it; "": none. `cache_salt` depends on it
    prediction: bytes = b""  # int32 little-endian: what the output may be, for draft tokens
    revision: int = 0  # of the output: grows when the gateway replaces its end; a live sequence then starts again
    session: str = ""  # whose turn it is, for log lines; "": none
    # Sequences of the same request that are submitted after it, and fail with it if it is refused: they get places of a
    # full queue together or not at all.
    following: int = 0


class Cancel(Frame, tag="C"):
    """End a sequence. Unknown ids are normal (the sequence has just ended) and ignored.

    `at`: number of output tokens that the gateway used, -1 for all; the rest do not count.
    """

    sequence: str
    at: int = -1


class ModelVocabulary(Frame, tag="V"):
    """What the token ids of a version mean. Sent before the first `Submit` with a constraint to a new scheduler.

    It is sent once: a scheduler that cannot store it yet keeps it.  Fields as in `Described`.
    """

    model: str
    pieces: bytes
    piece_ends: bytes
    control: bytes
    eos_ids: tuple[int, ...]


class Logprob(Frame):
    """Natural logarithms, of the distribution before temperature and penalties."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SequenceTokens(Frame):
    """Output tokens of one sequence, in order. `start` is the output index of the first."""

    sequence: str
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    finish: str = ""  # "stop" (stop id), "length", "error", "timeout", "cancelled"; ends it
    error: str = ""  # with finish "error"/"timeout": code, see errors.py
    message: str = ""
    cached_tokens: int = 0  # with the first tokens: prompt tokens that came from the cache
    accepted: int = 0  # draft tokens accepted so far
    score_start: int = 0  # index in the prompt of the first token in `scores`
    scores: bytes = b""  # of prompt tokens, as stages/gateway/requests/prompt_scores.py reads them
    revision: int = 0  # of the submission; the gateway ignores those of an earlier one
    param: str = ""  # with finish "error": the request's field at fault
    attachment: int = 0  # with finish "stop"/"length": of the worker group that computed it, see `ModelState`


class SequenceEvent(Frame):
    """What happened to a sequence, for the timeline of its request. Lost events cost only their lines in it.

    name: "queued", "admitted" (it has a row and pages), "prefill" (a chunk of its prompt is computed), "preempted",
    "reattached" (a new gateway continues it); without a sequence, "lost" or "started": the model's worker group. With
    a sequence, too, if the model has several groups: the one that computes the request's sequences.
    """

    sequence: str  # "": all of the model
    name: str
    at: float  # s, of the clock of `Tokens.at`; 0.0: that time
    pid: int = 0  # of the worker's rank 0; 0: the scheduler
    facts: dict[str, int | float | str] = {}


class Tokens(Frame, tag="T"):
    """New tokens of all sequences of one step; sent without tokens for sequences that have left the queue."""

    model: str
    step: int
    sequences: list[SequenceTokens]
    started: tuple[str, ...] = ()  # have pages, and their prompts are computed from now on: no bound refuses them
    events: tuple[SequenceEvent, ...] = ()
    at: float = 0.0  # s, by the scheduler's monotonic clock: when the frame was made. Set with events


class Rejected(Frame, tag="R"):
    """The sequence was not admitted. This is its terminal event."""

    sequence: str
    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class Pooled(Frame, tag="P"):
    """The final hidden states of a prompt, pooled. This is the sequence's terminal event."""

    sequence: str
    vector: bytes  # f32 little-endian


class ModelState(Frame):
    """State of one loaded model version."""

    model: str
    digest: str
    ready: bool
    reason: str
    waiting: int
    running: int
    max_batch_size: int
    kv_free_pages: int = 0
    kv_total_pages: int = 0
    adapters: tuple[tuple[str, str], ...] = ()  # as in `WorkerReady`
    kernels: str = ""  # as in `WorkerReady`; "": no worker group has been attached
    ranks: int = 0  # as in `WorkerReady`, with `nodes`
    nodes: tuple[int, ...] = ()
    # Of each worker group that is attached: names this attachment, among those of all schedulers. Higher: later.
    attachments: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()  # of several worker groups: why each computes nothing, "" for one that is ready


class SchedulerState(Frame, tag="Q"):
    """State of every loaded model version. Sent to each gateway with every heartbeat and after every change."""

    models: list[ModelState]


GatewayToScheduler = Hello | Heartbeat | Submit | Cancel | ModelVocabulary
SchedulerToGateway = Hello | Heartbeat | Tokens | Rejected | SchedulerState | Pooled
