"""Every frame that crosses processes, typed, tagged and positional.

One union for each edge and direction (`edges.py` says who binds and what happens when it is
full).  Structs are `array_like`: fields are appended with a default, never reordered or removed.
Frames carry descriptors; bytes stay in arenas.  Knows nothing of sockets.

Ids: a *request* id is the public one (`req-...`, unique everywhere).  A *sequence* id is
`request/choice`: one line of tokens, and the unit of scheduling and leasing.
"""

from __future__ import annotations

from typing import Any, NewType

import msgspec

PROTOCOL_VERSION = 3
MAX_SESSION_ID = 128  # characters of a session's id

SequenceId = NewType("SequenceId", str)


class Frame(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Base of all frames."""


# ------------------------------------------------------------------ on every edge, both ways


class Hello(Frame, tag="H"):
    """First frame from a peer, and again whenever it has lost its state (a restart)."""

    stage: str
    epoch: int  # start of this process, ns since 1970: a larger one replaces a smaller one
    pid: int
    start_ticks: int  # /proc/PID/stat field 22: with pid, names the process for ever
    protocol: int = PROTOCOL_VERSION
    contact: int = 0  # changes when the sender had given the receiver up, see wire.py


class Heartbeat(Frame, tag="B"):
    """Sent every `heartbeat_ms` on every edge; by the connecting side of a quiet stage, see `ipc.endpoint`."""

    stage: str
    epoch: int
    progress: int  # grows while the stage does work; a busy stage whose value stands is stuck
    busy: bool  # it has work
    ready: bool  # it can take work
    reason: str = ""  # why it is not ready
    idle: bool = False  # nothing moves: over a connection that it made it says so less often
    sent: int = -1  # frames sent to this peer since Hello, set by wire.py: one that is missing was lost; -1: untold


# ------------------------------------------------------------------ sampling


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
    order: tuple[str, ...] = ()  # empty: the default order, see stages/worker/sampling.py
    logit_bias: tuple[tuple[int, float], ...] = ()  # at most 300


# ------------------------------------------------------------------ gateway <-> tokenizer


class Encode(Frame, tag="e"):
    """Text to token ids."""

    id: str
    model: str
    text: str
    parse_special: bool = False  # special tokens written in the text become their ids
    add_bos: bool = True  # if the model asks for one
    offsets: bool = False
    token_limit: int = 0  # of a text with more tokens only their number is answered; 0: no limit


class Render(Frame, tag="r"):
    """Chat messages to text by the model's template, then to token ids (special tokens parsed)."""

    id: str
    model: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    template_vars: dict[str, Any] = {}
    token_limit: int = 0  # as in Encode


class Detokenize(Frame, tag="d"):
    """What do these tokens read like, all of them?"""

    id: str
    model: str
    tokens: tuple[int, ...]
    skip_special: bool = False


class Describe(Frame, tag="m"):
    """What does the gateway need to know about a model?"""

    id: str
    model: str
    known: tuple[str, ...] = ()  # digests of tokenizers whose pieces it has: they are not sent again


class Encoded(Frame, tag="E"):
    id: str
    tokens: tuple[int, ...]
    offsets: bytes = b""  # u32 little-endian: begin and end of each token in the UTF-8 text
    too_many: int = 0  # tokens, more than `token_limit`: none of them are here
    is_exact: bool = False  # else `too_many` is what they are at least: no more was counted than had to be


class Detokenized(Frame, tag="D"):
    id: str
    text: str


class Described(Frame, tag="M"):
    id: str
    model: str
    digest: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    chat: bool  # it has a chat template
    architecture: str = ""
    parameters: int = 0
    created: int = 0
    tokenizer: str = ""  # digest of vocabulary, merges, special ids and template
    pieces: bytes = b""  # what each token reads like, one after the other
    piece_ends: bytes = b""  # u32 little-endian, for each token: where its piece ends
    control: bytes = b""  # i32 little-endian: ids that are no text


class TokenizerFailed(Frame, tag="X"):
    """`code` and `param` as in pipeline/errors.py."""

    id: str
    code: str
    message: str
    param: str = ""


GatewayToTokenizer = Hello | Heartbeat | Encode | Render | Detokenize | Describe
TokenizerToGateway = Hello | Heartbeat | Encoded | Detokenized | Described | TokenizerFailed


# ------------------------------------------------------------------ gateway <-> scheduler


class Submit(Frame, tag="S"):
    """One sequence to be generated.

    `forced` are output tokens that were delivered before a recovery: they are computed as part
    of the prompt but count as output (sampling positions, penalties, limits).
    """

    sequence: str
    request: str
    model: str
    tenant: str
    prompt: bytes  # int32 little-endian token ids
    max_tokens: int  # output tokens, forced ones included
    sampling: Sampling
    choice: int = 0
    forced: bytes = b""  # int32 little-endian
    stop_ids: tuple[int, ...] = ()
    deadline_ms: int = 0  # left of the request's time when sent; 0: none
    priority: int = 0
    cache_salt: str = ""
    speculate: int = 0  # most draft tokens in a step; 0: as configured, -1: none


class Cancel(Frame, tag="C"):
    """Late or unknown ids are normal and ignored. `at` truncates: tokens past it were not used."""

    sequence: str
    at: int = -1


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


class Tokens(Frame, tag="T"):
    """All sequences that moved in a step: one frame."""

    model: str
    step: int
    sequences: list[SequenceTokens]


class Rejected(Frame, tag="R"):
    """Not admitted. This is the sequence's terminal event."""

    sequence: str
    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class ModelState(Frame):
    model: str
    digest: str
    ready: bool
    reason: str
    waiting: int
    running: int
    max_batch_size: int
    kv_free_pages: int = 0
    kv_total_pages: int = 0


class SchedulerState(Frame, tag="Q"):
    """State of every loaded model version. Sent to each gateway with every heartbeat and after every change."""

    models: list[ModelState]


GatewayToScheduler = Hello | Heartbeat | Submit | Cancel
SchedulerToGateway = Hello | Heartbeat | Tokens | Rejected | SchedulerState


# ------------------------------------------------------------------ scheduler <-> kv


class Acquire(Frame, tag="a"):
    """Pages for a new sequence whose tokens stand in row `row` of the model's step arena.

    The answer shares as many full cached pages as match (never the page of the last token: its
    logits are needed) and leases fresh ones up to `want_tokens` positions.
    """

    id: int  # correlation; grows
    model: str
    sequence: str
    row: int
    n_tokens: int  # known tokens in the row
    want_tokens: int
    salt: str = ""


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


class Release(Frame, tag="l"):
    """The sequence is over (or set aside); `n_tokens` positions of it hold good.

    Sent once no unacknowledged step names the sequence: its pages go to others at once.
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
    leases: list[tuple[str, int, int, tuple[int, ...]]]  # sequence, row, n_tokens, pages


class Granted(Frame, tag="G"):
    """`pages` is the sequence's whole page table so far; the first `cached_tokens` positions are computed.

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
    """Pushed with every heartbeat."""

    model: str
    total: int
    free: int
    cached: int
    leased: int
    page_bytes: int


class KvAttach(Frame, tag="t"):
    """Which model's steps arena to read tokens from, and which generation of it."""

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
    generation: int = 0  # of the arena's contents: another one than known means all leases are gone


SchedulerToKv = Hello | Heartbeat | KvAttach | Acquire | Extend | Commit | Release | Reconcile
KvToScheduler = Hello | Heartbeat | KvReady | Granted | Denied | KvState


# ------------------------------------------------------------------ gateway <-> kv: sessions


class SessionBegin(Frame, tag="b"):
    """A turn of a session begins; one at a time. Answers `SessionHeld` or `SessionRefused`.

    Asked again for a turn that is under way (an answer was lost, kv has restarted): `resume` is its
    number, and the answer is the same.  -1: whichever the sender may have begun before.
    """

    id: int  # correlation; grows
    model: str
    tenant: str
    session: str = ""  # "": kv makes one up, with `create`
    create: bool = False  # it may be new; otherwise one that is not there is NOT_FOUND
    ttl_s: int = 0  # of a new one: closed when unused for so long; 0: never
    salt: str = ""  # of a new one: `Submit.cache_salt` of its turns
    resume: int = 0
    version: str = ""  # version of the model that computes the turn, see pipeline/models/versions.py; "": that serves


class SessionCommit(Frame, tag="p"):
    """The turn is over: the session holds its first `base` tokens and then `tokens`.

    Sent again with the same contents it is answered the same. Durable when answered.
    """

    id: int
    model: str
    tenant: str
    session: str
    turn: int
    base: int
    tokens: bytes  # int32 little-endian


class SessionAbort(Frame, tag="v"):
    """The turn was cancelled or failed: the session is what it was before, if it was. No answer."""

    model: str
    tenant: str
    session: str
    turn: int


class SessionClose(Frame, tag="z"):
    """Tokens and pages go at once. Answers `SessionDone`, or `SessionRefused` with NOT_FOUND."""

    id: int
    model: str
    tenant: str
    session: str


class SessionHeld(Frame, tag="h"):
    """The turn may begin. The session holds `tokens`."""

    id: int
    session: str
    turn: int  # grows by one with each turn that is committed
    tokens: bytes  # int32 little-endian
    salt: str = ""


class SessionDone(Frame, tag="g"):
    """Committed or closed. `n_tokens` are held now."""

    id: int
    session: str
    n_tokens: int


class SessionRefused(Frame, tag="u"):
    """`code` and `param` as in pipeline/errors.py."""

    id: int
    code: str
    message: str
    param: str = ""


GatewayToKv = Hello | Heartbeat | SessionBegin | SessionCommit | SessionAbort | SessionClose
KvToGateway = Hello | Heartbeat | SessionHeld | SessionDone | SessionRefused


# ------------------------------------------------------------------ scheduler <-> worker


class WorkerReady(Frame, tag="w"):
    """The group has mapped the weights, compiled its kernels and is in no step."""

    model: str
    digest: str
    epoch: int
    ranks: int
    pids: tuple[tuple[int, int], ...]  # (pid, start_ticks) of every rank, rank 0 first
    vocab_size: int
    context_length: int
    isa: str = ""
    vocabulary: str = ""  # digest of what its token ids mean, where drafts depend on it


class Attach(Frame, tag="A"):
    """Use these arenas from step `next_step` on; answers `WorkerReady`.

    `generation` is the ring's: slots and doorbells of another one are ignored.  `bell` is the path of a
    Unix datagram socket: any datagram there wakes a sleeping scheduler as `StepDone` does, at a tenth
    of the price to both ("": there is none; one that refuses or is full has been rung).
    """

    model: str
    generation: int
    steps_path: str
    kv_path: str
    next_step: int
    doorbell: str = ""


class Detach(Frame, tag="Z"):
    """Finish the step under way, let go of the arenas and say `WorkerReady` again."""

    generation: int


class StepPublished(Frame, tag="s"):
    """Doorbell, rung only for a sleeping peer; the ring's counters are the truth."""

    generation: int
    step: int


class StepDone(Frame, tag="o"):
    """Doorbell from rank 0 to a sleeping scheduler."""

    generation: int
    step: int


SchedulerToWorker = Hello | Heartbeat | Attach | Detach | StepPublished
WorkerToScheduler = Hello | Heartbeat | WorkerReady | StepDone


def encode(frame: Frame, _encoder: msgspec.msgpack.Encoder = msgspec.msgpack.Encoder()) -> bytes:
    """One frame as msgpack bytes."""
    return _encoder.encode(frame)
