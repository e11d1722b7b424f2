"""Every message between processes: typed, tagged, positional structs ("frames"), encoded as msgpack.

There is one union of frames per edge and direction, and `FRAMES` maps an edge's name to its two unions;
`topology.py` says which stage binds the edge and what happens when its queue is full.  Structs are
`array_like`: fields are appended with a default; removing or reordering one needs a new `PROTOCOL_VERSION`.
Frames carry descriptors; logits, weights and KV pages stay in arenas.  This module does not use sockets.

Ids: a *request* id is the public one (`req-...`, unique everywhere).  A *sequence* id is `request/choice`;
a sequence is the unit of scheduling and leasing.

Length: the whole protocol in one file, so that tags and field orders can be compared at a glance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pipeline.errors import StarlingError

PROTOCOL_VERSION = 3
MAX_SESSION_ID = 128  # characters of a session's id


def request_of(sequence: str) -> str:
    """The id of the request that a sequence belongs to."""
    return sequence.rpartition("/")[0]


class Frame(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Base of all frames."""


# ------------------------------------------------------------------ on every edge, both ways


class Hello(Frame, tag="H"):
    """First frame of a process to a peer, sent again when it has discarded its state about that peer."""

    stage: str
    epoch: int  # start of this process, ns since 1970; a larger epoch replaces a smaller one
    pid: int
    start_ticks: int  # /proc/PID/stat field 22; (pid, start_ticks) identifies the process uniquely
    protocol: int = PROTOCOL_VERSION
    contact: int = 0  # grows each time the sender has discarded the receiver, see pipeline/ipc/liveness.py


class Heartbeat(Frame, tag="B"):
    """Sent every `heartbeat_ms` on every edge; less often by an idle stage, see pipeline/ipc/liveness.py."""

    stage: str
    epoch: int
    progress: int  # grows while the stage works; a busy stage whose value does not change is stuck
    busy: bool  # it has work
    ready: bool  # it can take work
    reason: str = ""  # why it is not ready
    idle: bool = False  # no work for a while: the next heartbeats may come less often
    sent: int = -1  # frames sent to this peer since `Hello`, set by the endpoint; detects lost frames. -1: not set


# ------------------------------------------------------------------ sampling


DRY_BREAKERS = ("\n", ":", '"', "*")


class Sampling(Frame):
    """Parameters of one sequence, validated by the gateway; neutral values switch a step off."""

    seed: int = 0  # u64, drawn by the gateway when the client gave none
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int = -1  # -1: none; n: the sampled token's and the n highest (n <= 20)
    min_tokens: int = 0  # stop tokens are masked while fewer tokens have been sampled
    ignore_eos: bool = False
    order: tuple[str, ...] = ()  # empty: the default order, see stages/worker/kernels/sampler.py
    logit_bias: tuple[tuple[int, float], ...] = ()  # at most 300
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens before the next one; -1: all
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS  # for the gateway, see `Submit.breakers`
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


class ReasoningPrefix(Frame):
    """The reasoning that may stand before an answer, between two marks; ids are those of control tokens, else -1."""

    begin: str
    end: str
    begin_id: int = -1
    end_id: int = -1
    is_open: bool = False  # the prompt ends in reasoning; False: the output may begin with the first mark


class Constraint(Frame):
    """What the whole output of a sequence must match; the end token is sampled only where it does.

    `kind` is one of CONSTRAINT_KINDS.  `field` is the client's field that it came from, for error messages.
    """

    kind: str
    text: str  # json_schema: JSON; choice: a JSON array of strings; the others: in their own language
    field: str = ""
    after: ReasoningPrefix | None = None  # the output may begin with reasoning, which need not match


# Of all positions, of the last one, of the first one; "rank": the score that the model makes of the first one.
POOLINGS = ("mean", "last", "cls", "rank")
CONSTRAINT_KINDS = ("json_schema", "regex", "choice", "lark", "gbnf")


# ------------------------------------------------------------------ gateway <-> tokenizer


class Encode(Frame, tag="e"):
    """Text to token ids."""

    id: str
    model: str
    text: str
    parse_special: bool = False  # encode special tokens that are written out in the text
    add_bos: bool = True  # if the model asks for one
    offsets: bool = False
    token_limit: int = 0  # above it the answer has only the token count; 0: no limit
    request: str = ""  # id of the request, for log lines
    suffix: str = ""  # the prompt asks for what stands between `text` and this; for models that can
    tenant: str = ""  # for log lines
    session: str = ""  # likewise; "": the request has none


class Render(Frame, tag="r"):
    """Chat messages to text by the model's template, then to token ids (special tokens parsed)."""

    id: str
    model: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    template_vars: dict[str, Any] = {}
    token_limit: int = 0  # as in Encode
    now: str = ""  # what `strftime_now` shows, ISO 8601; "": the tokenizer's clock
    request: str = ""  # as in Encode
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool = False  # the prompt ends where the content of the last message ends
    tenant: str = ""  # as in Encode
    session: str = ""  # as in Encode


class Detokenize(Frame, tag="d"):
    """Token ids to text."""

    id: str
    model: str
    tokens: tuple[int, ...]
    skip_special: bool = False
    request: str = ""  # as in Encode
    tenant: str = ""  # as in Encode
    session: str = ""  # as in Encode


class Describe(Frame, tag="m"):
    """Ask for a model's properties and its vocabulary. Answered by `Described`."""

    id: str
    model: str
    known: tuple[str, ...] = ()  # digests of tokenizers that the gateway has cached: their pieces are not sent again


class Encoded(Frame, tag="E"):
    """Answer to `Encode` and `Render`."""

    id: str
    tokens: tuple[int, ...]
    offsets: bytes = b""  # u32 little-endian: begin and end of each token in the UTF-8 text
    too_many: int = 0  # number of tokens, when above `token_limit`; `tokens` is then empty
    is_exact: bool = False  # False: `too_many` is only a lower bound, because encoding stopped early


class Detokenized(Frame, tag="D"):
    """Answer to `Detokenize`."""

    id: str
    text: str


class Described(Frame, tag="M"):
    """Answer to `Describe`."""

    id: str
    model: str
    digest: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    chat: bool  # the model has a chat template
    architecture: str = ""
    parameters: int = 0
    created: int = 0
    tokenizer: str = ""  # digest of vocabulary, merges, special ids and template
    pieces: bytes = b""  # the bytes of every token, concatenated
    piece_ends: bytes = b""  # u32 little-endian: end of each token's bytes in `pieces`
    control: bytes = b""  # i32 little-endian: ids of control tokens, which have no text
    tool_format: str = ""  # how the model writes tool calls; "": its chat template has no place for tools
    pooling: str = ""  # of embeddings: one of POOLINGS; "": the file does not say
    width: int = 0  # values of an embedding
    end_id: int = -1  # token that ends a text to be embedded; -1: none
    generates: bool = True  # it generates text; False: it has embeddings alone
    fim_ends: tuple[int, ...] = ()  # tokens that end a text between a prompt and a `suffix`
    reasoning: tuple[str, ...] = ()  # marks before and after the model's reasoning; empty: it has none
    thinking_switches: tuple[str, ...] = ()  # variables by which its chat template turns reasoning on and off
    pair_separator: tuple[int, ...] = ()  # with pooling "rank": tokens between the two texts of a pair
    quantization: str = ""  # format of most bytes of the weights; "": not known
    kv_shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # layers, KV heads, head dim, window (0: all positions)
    kv_windowed: int = 0  # layers with that window where others have none; 0: all layers have it, or none


class TokenizerFailed(Frame, tag="X"):
    """Error answer. `code` and `param` as in pipeline/errors.py."""

    id: str
    code: str
    message: str
    param: str = ""


GatewayToTokenizer = Hello | Heartbeat | Encode | Render | Detokenize | Describe
TokenizerToGateway = Hello | Heartbeat | Encoded | Detokenized | Described | TokenizerFailed


# ------------------------------------------------------------------ gateway <-> scheduler


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


class Cancel(Frame, tag="C"):
    """End a sequence. Unknown ids are normal (the sequence has just ended) and ignored.

    `at`: number of output tokens that the gateway used, -1 for all; the rest do not count.
    """

    sequence: str
    at: int = -1


class ModelVocabulary(Frame, tag="V"):
    """What the token ids of a version mean. Sent before the first `Submit` with a constraint to a new scheduler.

    Fields as in `Described`.
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


class SequenceEvent(Frame):
    """What happened to a sequence, for the timeline of its request. Lost events cost only their lines in it.

    name: "queued", "admitted" (it has a row and pages), "prefill" (a chunk of its prompt is computed), "preempted",
    "reattached" (a new gateway continues it); without a sequence, "lost" or "started": the model's worker group.
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


class SchedulerState(Frame, tag="Q"):
    """State of every loaded model version. Sent to each gateway with every heartbeat and after every change."""

    models: list[ModelState]


GatewayToScheduler = Hello | Heartbeat | Submit | Cancel | ModelVocabulary
SchedulerToGateway = Hello | Heartbeat | Tokens | Rejected | SchedulerState | Pooled


# ------------------------------------------------------------------ scheduler <-> kv


class Acquire(Frame, tag="a"):
    """Pages for a new sequence whose tokens are in row `row` of the model's step arena.

    `kv` shares as many full cached pages as match (never the page of the last token, whose logits
    are needed) and leases free pages up to `want_tokens` positions.
    """

    id: int  # correlates the answer; grows
    model: str
    sequence: str
    row: int
    n_tokens: int  # known tokens in the row
    want_tokens: int
    salt: str = ""
    sharable: int = -1  # leading positions that may be shared; -1: as many as match
    # Positions that attention reads in layers with a window, the query's included; 0: all. Older pages of their groups
    # are not needed (shm/layer_groups.py).
    window: int = 0
    ahead: int = 0  # with `window`: at most so many positions beyond the cached ones are leased
    tenant: str = ""  # for log lines
    session: str = ""  # likewise, as in `Submit`


class Extend(Frame, tag="x"):
    """More pages, so that the sequence holds `want_tokens` positions."""

    id: int
    model: str
    sequence: str
    want_tokens: int


class Commit(Frame, tag="c"):
    """The first `n_tokens` positions are computed and acknowledged: full pages may be indexed."""

    model: str
    sequence: str
    n_tokens: int
    unread: int = 0  # leading positions that no step reads any more in layers with a window: those pages are released


class Release(Frame, tag="l"):
    """The sequence has ended or was preempted; its first `n_tokens` positions are valid.

    Sent when no unacknowledged step contains the sequence: its pages can be leased again at once.
    """

    model: str
    sequence: str
    n_tokens: int


class Reconcile(Frame, tag="y"):
    """After a restart of `kv` or of the scheduler: all leases that the scheduler holds.

    `kv` allocates nothing before it and frees every page that no listed lease contains.  A scheduler that has
    just started, and holds no lease, sends it only after the worker has detached from the old generation
    (`WorkerReady`).
    """

    model: str
    leases: list[tuple[str, int, int, tuple[int, ...]]]  # sequence, row, n_tokens, pages (as in `Granted`)
    owners: tuple[tuple[str, str], ...] = ()  # tenant and session of each lease, for log lines; (): not known


class Granted(Frame, tag="G"):
    """`pages` is the sequence's whole page table so far; the first `cached_tokens` positions are computed.

    -1 stands for each page of the first places that the sequence does not hold, because no step reads it
    (`Commit.unread`).
    `id` is the request's and is unique for each model only.
    """

    id: int
    sequence: str
    pages: tuple[int, ...]
    cached_tokens: int = 0
    model: str = ""


class Denied(Frame, tag="N"):
    """No pages now (`fits`: they would fit into an empty arena) or never. `id` as in `Granted`; 0: see `KvReady`."""

    id: int
    sequence: str
    fits: bool
    needed_pages: int
    free_pages: int  # free or evictable
    total_pages: int
    model: str = ""


class KvState(Frame, tag="K"):
    """Page counts of a model. Sent with every heartbeat."""

    model: str
    total: int
    free: int
    cached: int
    leased: int
    page_bytes: int


class KvAttach(Frame, tag="t"):
    """The step arena from which `kv` reads a model's tokens."""

    model: str
    digest: str
    steps_path: str


class KvReady(Frame, tag="k"):
    """The model's KV arena exists. With `reconciled` False the scheduler must send `Reconcile` first.

    Sent again, with `reconciled` True, after `Reconcile` has been processed.  For each listed lease that kv cannot
    verify it sends `Denied` with id 0: the scheduler releases the sequence and acquires its pages again.
    """

    model: str
    digest: str
    arena_path: str
    pages: int
    page_tokens: int
    page_bytes: int
    reconciled: bool = True
    error: str = ""
    generation: int = 0  # of the arena's contents; when it changes, all leases are lost


SchedulerToKv = Hello | Heartbeat | KvAttach | Acquire | Extend | Commit | Release | Reconcile
KvToScheduler = Hello | Heartbeat | KvReady | Granted | Denied | KvState


# ------------------------------------------------------------------ gateway <-> kv: sessions


class SessionBegin(Frame, tag="b"):
    """Begin a turn of a session; a session has one turn at a time. Answered by `SessionHeld` or `SessionRefused`.

    Sent again for a turn that has begun (the answer was lost, or `kv` has restarted), with `resume` the turn's
    number: the answer is the same.  `resume` -1: any turn that this sender may have begun before.
    """

    id: int  # correlates the answer; grows
    model: str
    tenant: str
    session: str = ""  # "" with `create`: `kv` generates the id
    create: bool = False  # create the session if it does not exist; otherwise NOT_FOUND
    ttl_s: int = 0  # of a new session: closed after this time without use; 0: never
    salt: str = ""  # of a new session: `Submit.cache_salt` of its turns
    resume: int = 0
    version: str = ""  # id of the model version that computes the turn; "": the serving one


class SessionCommit(Frame, tag="p"):
    """The turn has ended: the session now consists of its first `base` tokens followed by `tokens`.

    Idempotent.  The session is on the disk when the answer is sent.
    """

    id: int
    model: str
    tenant: str
    session: str
    turn: int
    base: int
    tokens: bytes  # int32 little-endian


class SessionAbort(Frame, tag="v"):
    """The turn was cancelled or failed: the session is as before, and removed if the turn created it. No answer."""

    model: str
    tenant: str
    session: str
    turn: int


class SessionClose(Frame, tag="z"):
    """Remove the session, its tokens and its pages. Answered by `SessionDone`, or `SessionRefused` with NOT_FOUND."""

    id: int
    model: str
    tenant: str
    session: str


class SessionHeld(Frame, tag="h"):
    """The turn may begin. `tokens` are the session's tokens so far."""

    id: int
    session: str
    turn: int  # grows by one with each turn that is committed
    tokens: bytes  # int32 little-endian
    salt: str = ""


class SessionDone(Frame, tag="g"):
    """Committed or closed. `n_tokens` is the session's length now."""

    id: int
    session: str
    n_tokens: int


class SessionRefused(Frame, tag="u"):
    """Error answer. `code` and `param` as in pipeline/errors.py."""

    id: int
    code: str
    message: str
    param: str = ""
    moved_to: str = ""  # of SESSION_MOVED: the agent that has the session

    def to_error(self) -> StarlingError:
        """The error."""
        error = StarlingError(self.code, self.message, self.param)
        error.moved_to = self.moved_to
        return error


GatewayToKv = Hello | Heartbeat | SessionBegin | SessionCommit | SessionAbort | SessionClose
KvToGateway = Hello | Heartbeat | SessionHeld | SessionDone | SessionRefused


# ------------------------------------------------------------------ scheduler <-> worker


class WorkerReady(Frame, tag="w"):
    """The worker group has mapped the weights, loaded its kernels and computes no step.

    `error` is set in the answer to an `Attach` that failed, for instance because the file system of the arenas is full.
    """

    model: str
    digest: str
    epoch: int
    ranks: int
    pids: tuple[tuple[int, int], ...]  # (pid, start_ticks) of every rank, rank 0 first
    vocab_size: int
    context_length: int
    isa: str = ""
    vocabulary: str = ""  # digest of the vocabulary, set where draft models must match it
    error: str = ""
    width: int = 0  # values of a hidden state
    is_causal: bool = True  # False: prompts are pooled alone, each in one step
    adapters: tuple[tuple[str, str], ...] = ()  # name and digest (hex) of each LoRA adapter that it has in memory
    window: int = 0  # positions that attention reads in layers with a window; 0: pages behind it are not released
    page_groups: tuple[int, int] = (1, 0)  # as `shm.layer_groups.LayerGroups`


class Attach(Frame, tag="A"):
    """Use these arenas from step `next_step` on. Answered by `WorkerReady`.

    `generation` is the ring's: slots and doorbells of other generations are ignored.  `doorbell` is the path of
    a Unix datagram socket: any datagram there wakes a sleeping scheduler as `StepDone` does, at a tenth of the
    cost to both ("": none exists).  A datagram that is refused because the socket is full counts as delivered.
    """

    model: str
    generation: int
    steps_path: str
    kv_path: str
    next_step: int
    doorbell: str = ""


class Detach(Frame, tag="Z"):
    """Finish the current step, detach from the arenas and send `WorkerReady` again."""

    generation: int


class StepPublished(Frame, tag="s"):
    """Doorbell to a sleeping worker; the ring's counters are authoritative."""

    generation: int
    step: int


class StepDone(Frame, tag="o"):
    """Doorbell from rank 0 to a sleeping scheduler; the ring's counters are authoritative."""

    generation: int
    step: int


SchedulerToWorker = Hello | Heartbeat | Attach | Detach | StepPublished
WorkerToScheduler = Hello | Heartbeat | WorkerReady | StepDone


# ------------------------------------------------------------------ by edge


class EdgeFrames(NamedTuple):
    """The unions of frames of one edge, by receiver."""

    to_binder: Any
    to_connector: Any


FRAMES: dict[str, EdgeFrames] = {
    "gateway-tokenizer": EdgeFrames(GatewayToTokenizer, TokenizerToGateway),
    "gateway-scheduler": EdgeFrames(GatewayToScheduler, SchedulerToGateway),
    "gateway-kv": EdgeFrames(GatewayToKv, KvToGateway),
    "scheduler-kv": EdgeFrames(SchedulerToKv, KvToScheduler),
    "scheduler-worker": EdgeFrames(WorkerToScheduler, SchedulerToWorker),
}


def encode(frame: Frame, _encoder: msgspec.msgpack.Encoder = msgspec.msgpack.Encoder()) -> bytes:
    """One frame as msgpack bytes."""
    return _encoder.encode(frame)
