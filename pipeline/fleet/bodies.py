"""The bodies of the agent's HTTP API, JSON both ways.

    POST /load_model, /load    LoadModelRequest    -> LoadModelResponse    200 loaded; 202 still loading
    POST /unload_model         UnloadModelRequest  -> UnloadModelResponse  200
    POST /heartbeat            HeartbeatRequest    -> HeartbeatResponse    200
    POST /infer                InferRequest and more fields                the engine's answer, streamed
    GET  /health                                      {"status": "healthy"}, without a token
    GET  /metrics                                     Prometheus text
    GET  /pieces/DIGEST/CHECKSUM                      -> PieceState        200; 404: the file is not here
    GET  /pieces/DIGEST/CHECKSUM/PIECE                the bytes of a piece; 429: too many are asked for
    POST /give_pages           GivePagesRequest    -> GivePagesResponse    200; 404: the request has no pages here
    POST /take_pages           TakePagesRequest    -> TakePagesResponse    200 the engine has them
    GET  /kv_pages/TICKET                             the pages of a ticket, once
    POST /list_prefixes        ListPrefixesRequest -> ListPrefixesResponse 200
    POST /give_prefixes        GivePrefixesRequest -> GivePagesResponse    200; 404: they are not here any more
    POST /take_prefixes        TakePrefixesRequest -> TakePagesResponse    200 the engine has them; 429
    POST /list_sessions        ListSessionsRequest -> ListSessionsResponse 200
    POST /give_session         GiveSessionRequest  -> GiveSessionResponse  200; 409: a turn is in progress
    POST /take_session         TakeSessionRequest  -> TakeSessionResponse  200 its copy is on the disk; 409, 429
    POST /move_session         MoveSessionRequest  -> MoveSessionResponse  200; 409: it has changed

An agent without credentials of the blob store says so in its heartbeats (`takes_signed_urls`).  It gets URLs with the
load request, names the blobs whose URLs it needs next (`wanted_urls`), and gets those with a later heartbeat.

Every call but /health carries `Authorization: Bearer TOKEN`.  Errors have the form of pipeline/api/error_response.py.
Model states are on the wire as `cache_state`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.api.json_body import parse_object
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.catalog.entry import Entry
from pipeline.errors import InvalidRequest
from pipeline.fleet.records import VERSION, AgentRecord

AgentState = Literal["IDLE", "LOADING_MODEL", "INFERRING", "DEGRADED"]
# Agents say LOADING_TO_GPU wherever an engine starts; orchestrators say LOADING if it computes on the CPU.
ModelState = Literal["DOWNLOADING", "LOADING_TO_GPU", "LOADING", "READY", "FAILED", "UNLOADED"]
# From near to far. PEER_CACHED and REMOTE are what an orchestrator finds out: no agent reports them of itself.
CacheLevel = Literal["GPU_RESIDENT", "CPU_RESIDENT", "DRAM_CACHED", "NVME_CACHED", "PEER_CACHED", "REMOTE"]

MAX_MODEL_ID = 128 + 1 + 64  # characters of MODEL:ADAPTER
ModelId = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_ID)]
MAX_CLAIMED = 64
MAX_URLS = 64  # of one model in one body
MAX_URL_CHARACTERS = 8192  # a token of a role makes it long

Tenant = Annotated[str, Meta(max_length=64)]
SessionId = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_SESSION_BYTES = 32 << 20  # 8 million tokens
TimeoutMs = Annotated[int, Meta(ge=0, le=86_400_000)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the requests: an unknown field is an error."""


class SignedUrls(Request, frozen=True, kw_only=True):
    """Where blobs of a published model can be read, each for `valid_s` from now. A URL needs nothing else: a secret."""

    entry: Entry
    valid_s: Annotated[float, Meta(gt=0, le=86_400)]
    urls: Annotated[
        dict[
            Annotated[str, Meta(max_length=512)],  # key of the blob
            Annotated[str, Meta(max_length=MAX_URL_CHARACTERS, pattern="^https?://")],
        ],
        Meta(max_length=MAX_URLS),
    ] = {}

    def __repr__(self) -> str:
        return f"SignedUrls({self.entry.name!r}, {len(self.urls)} URLs)"


class SignedAdapter(Request, frozen=True, kw_only=True, omit_defaults=True):
    """A published adapter. `url`: where its file can be read for some minutes; a secret."""

    entry: AdapterEntry
    url: Annotated[str, Meta(max_length=MAX_URL_CHARACTERS, pattern="^https?://")]

    def __repr__(self) -> str:
        return f"SignedAdapter({self.entry.name!r})"


class LoadModelRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Load a published model, or one of its adapters (MODEL:ADAPTER) and the model unless it is loaded.

    Repeated, it waits for the load that runs, or answers at once.  Fields at their defaults are left out: older agents
    refuse new ones.
    """

    model_id: ModelId
    digest: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""  # refused if the name has another model
    wait: bool = True  # false: answer at once, with 202 while it is loading
    timeout_ms: TimeoutMs = 600_000  # of waiting; the load goes on
    signed: SignedUrls | None = None  # sent to agents that say that they take them
    adapter_digest: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""  # likewise of the adapter
    adapter: SignedAdapter | None = None  # sent to agents that take signed URLs


class UnloadModelRequest(Request, frozen=True, kw_only=True):
    """Stop the engine of a model. Streams in flight get the engine's drain time.

    Of MODEL:ADAPTER the adapter alone goes, and the requests that it has finish.
    """

    model_id: ModelId
    drop_cached: bool = False  # remove the files, too
    only_idle: bool = False  # refuse with 409 while the model has requests


class PrefixCursor(Request, frozen=True, kw_only=True):
    """How many changes an orchestrator has of the prefixes of one start of an engine."""

    incarnation: Annotated[str, Meta(max_length=128)]  # of the engine
    number: Annotated[int, Meta(ge=0)] = 0  # of the last change; 0: it has none


class HeartbeatRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Sent by an orchestrator, periodically. Fields at their defaults are left out: older agents refuse new ones."""

    orchestrator_id: Annotated[str, Meta(max_length=128)] = ""
    extend_lease: bool = False  # serve on for another lease while the agent cannot reach the store
    # Which models' prefixes to publish, from where. Sent to agents that say that they publish them.
    prefixes_after: Annotated[dict[ModelId, PrefixCursor], Meta(max_length=64)] = {}
    signed: Annotated[tuple[SignedUrls, ...], Meta(max_length=64)] = ()  # for models that the agent was asked to load


class GivePagesRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Asks the agent of a running request for its KV pages, which another agent is to get."""

    model_id: ModelId
    request_id: Annotated[str, Meta(min_length=1, max_length=128)]
    agent_id: Annotated[str, Meta(min_length=1, max_length=63)]  # who may get them
    max_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 0  # that it takes; 0: not known. Only to agents that say theirs


class TakePagesRequest(Request, frozen=True, kw_only=True):
    """Tells an agent to get KV pages for a request that its engine is about to get."""

    model_id: ModelId
    request_id: Annotated[str, Meta(min_length=1, max_length=128)]  # as the engine will get it
    source: AgentRecord
    ticket: Annotated[str, Meta(pattern="^[0-9A-Za-z_-]{16,64}$")]  # of the source's answer
    bytes: Annotated[int, Meta(gt=0, le=1 << 40)]  # likewise
    timeout_ms: Annotated[int, Meta(ge=1, le=60_000)]  # then the engine computes them
    tenant: Annotated[str, Meta(max_length=64)] = ""  # whose pages they are; "": of none in particular


MAX_PREFIXES = 64  # of a model in one body
MAX_IDLE_S = 1e9  # since the last use of a page


class ListPrefixesRequest(Request, frozen=True, kw_only=True):
    """Asks for the prefixes that most requests shared. What is left of them to be sent is in heartbeats."""

    model_id: ModelId
    limit: Annotated[int, Meta(ge=0, le=65_536)]  # pages; 0: none, and nothing is left to be sent


class GivePrefixesRequest(Request, frozen=True, kw_only=True):
    """Asks for the KV pages of prefixes, which another agent is to get."""

    model_id: ModelId
    tails: Annotated[
        tuple[Annotated[str, Meta(pattern="^[0-9a-f]{32}$")], ...], Meta(min_length=1, max_length=MAX_PREFIXES)
    ]  # the last page of each
    agent_id: Annotated[str, Meta(min_length=1, max_length=63)]  # who may get them
    max_bytes: Annotated[int, Meta(gt=0, le=1 << 40)]  # that it takes


class TakePrefixesRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Tells an agent to get KV pages of one tenant, which its engine caches for no request."""

    model_id: ModelId
    source: AgentRecord
    ticket: Annotated[str, Meta(pattern="^[0-9A-Za-z_-]{16,64}$")]  # of the source's answer
    bytes: Annotated[int, Meta(gt=0, le=1 << 40)]  # likewise
    timeout_ms: Annotated[int, Meta(ge=1, le=60_000)]
    tenant: Annotated[str, Meta(max_length=130)]  # their owner, as the engine names it; "": everybody's
    uses: Annotated[int, Meta(ge=1, le=2**32 - 1)]  # of the least used one
    idle_s: Annotated[float, Meta(ge=0, le=MAX_IDLE_S)]  # since the last use of that which was used longest ago
    account: Tenant = ""  # the tenant's name; "": not known. Sent to agents that say that they count by it


class ListSessionsRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for the sessions of a model that are here, or whose move is not complete; some at a time."""

    model_id: ModelId
    after: tuple[Tenant, SessionId] | None = None  # the last one of the answer before; null: from the first one
    moving: bool = False  # only those whose move is not complete


class GiveSessionRequest(Request, frozen=True, kw_only=True):
    """Asks for what another agent needs to go on with a session. The session stays."""

    model_id: ModelId
    tenant: Tenant
    session: SessionId
    agent_id: Annotated[str, Meta(min_length=1, max_length=63)]  # who gets it


class TakeSessionRequest(Request, frozen=True, kw_only=True):
    """Tells an agent to keep a copy of a session, whose turns do not begin yet."""

    model_id: ModelId
    record: Annotated[bytes, Meta(min_length=1, max_length=MAX_SESSION_BYTES)]  # of the source's answer


class MoveSessionRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """A step of the move of a session (stages/kv/sessions/session_transfer.py)."""

    model_id: ModelId
    tenant: Tenant
    session: SessionId
    move: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]  # of the source's answer
    # `check` changes nothing. Sent to agents that say that they do it.
    step: Literal["give_up", "activate", "settle", "refuse", "discard", "check"]
    agent_id: Annotated[str, Meta(min_length=1, max_length=63)]  # the other agent of the move
    tokens: Annotated[int, Meta(ge=0, le=MAX_SESSION_BYTES // 4)] = 0  # of the session, for `check`; 0: not known


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `path` of the engine; the other fields are the engine's. Unknown fields are passed on."""

    model: ModelId
    path: Literal["/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/messages"] = "/v1/chat/completions"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a load is."""

    phase: str  # "download", "verify", "load"
    done: int = 0  # bytes
    total: int = 0  # bytes; 0: unknown


class LoadModelResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model, or one that is loading."""

    status: Literal["success", "loading"]
    model_id: str
    model_state: ModelState = msgspec.field(name="cache_state")
    inference_endpoint_url: str = ""  # "": not yet
    engine_key: str = ""  # API key of that endpoint
    digest: str = ""  # SHA-256 of the GGUF file
    progress: Progress | None = None


class UnloadModelResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A model without an engine."""

    status: Literal["success"]
    model_id: str
    model_state: ModelState = msgspec.field(name="cache_state", default="UNLOADED")
    cache_level: CacheLevel = "REMOTE"  # what is left


class PrefixUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of the pages that an engine's KV cache holds. A page's name is in pipeline/api/page_names.py."""

    after: int  # the change that these follow; 0: everything that was known is replaced
    number: int  # the last one
    added: bytes = b""  # names, u64 little-endian
    removed: bytes = b""  # likewise; applied first


class GivePagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket for KV pages. It opens nothing else, and nothing twice: a secret."""

    ticket: str
    pages: int
    bytes: int  # of all, with what names them
    of_pages: int = 0  # that the request has, of which those are the first ones; 0: an older release does not say


class TakePagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """KV pages that wait in the engine for their request."""

    pages: int
    seconds: float  # that it took


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that several requests shared."""

    tail: str  # hash of its last page, hex
    names: bytes  # of its pages, the first one first: u64 little-endian (pipeline/api/page_names.py)
    tenant: str  # their owner, as the engine names it (pipeline/api/page_owner.py); "": everybody's
    uses: int  # sequences that have held the last page
    idle_s: float  # since then


class ListPrefixesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The most used ones first."""

    prefixes: tuple[HotPrefix, ...] = ()
    page_bytes: int = 0  # of a page, with what names it


class SessionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A session of an engine."""

    tenant: str
    session: str
    state: Literal["held", "arrived", "moved"]
    agent: str = ""  # the other one of a move that is not complete: the source if arrived, the target if moved
    move: str = ""  # its name
    busy: bool = False  # a turn is in progress, or may be


class ListSessionsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions, in the order of tenant and id."""

    sessions: tuple[SessionEntry, ...]
    more: bool = False  # there are further ones


class GiveSessionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A session for another agent: its tokens, which are tenants' data."""

    record: bytes
    move: str
    tokens: int = 0  # of the session; 0: an older release does not say
    tails: tuple[str, ...] = ()  # hashes of its last pages, hex, the last one first: those that are here can be sent
    owner: str = ""  # of its pages, as the engine names it; "": everybody's


class TakeSessionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The copy is on the disk."""

    move: str


class MoveSessionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A step was done."""

    given_up: bool = False  # the answer to `refuse`: the source has given the session up
    gone: bool = False  # the answer to `activate`: the copy was closed, has expired, or has moved on


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a model that has an engine, or is getting one."""

    name: str  # requests ask for MODEL:NAME
    digest: str  # SHA-256 of its prepared file
    bytes: int
    is_ready: bool  # requests for it may be sent, if the model is ready
    running: int = 0  # requests that name it
    requests: int = 0  # that have named it and ended, since its engine started


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that has an engine, or is getting one."""

    model_id: str
    model_state: ModelState = msgspec.field(name="cache_state")
    cache_level: CacheLevel
    engine: str = "starling"  # adapter
    inference_endpoint_url: str = ""  # of chat completions; the engine's other endpoints are beside it
    engine_url: str = ""  # base: http://HOST:PORT; also of an engine that gets no more requests, for those it has
    engine_key: str = ""  # API key of the engine
    engine_incarnation: str = ""  # changes with each start of the engine
    # What names the bytes of answers: streams continue only on an engine where all three are equal.
    digest: str = ""  # SHA-256 of the GGUF file
    kv_type: str = ""  # and `Index.revision`, which orchestrators of older releases compare with it
    numerics: int = 0  # 0: the engine does not promise equal bytes
    can_continue: bool = False  # it names its output tokens, and goes on from those of another engine
    running: int = 0  # sequences
    vllm_queue_length: int = 0  # sequences that wait
    kv_cache_hit_rate: float = 0.0  # of pages, since the engine started
    bytes: int = 0  # of the checkpoint
    restarts: int = 0  # of the engine
    load_s: float = 0.0  # that its last start took
    progress: Progress | None = None
    error: str = ""  # why it failed last
    requests: int = 0  # sequences that the engine has taken since it started
    sessions: int = 0  # that it holds
    publishes_prefixes: bool = False  # the agent can say which pages the engine's KV cache holds
    held_pages: int = 0  # of which it has published the names
    prefixes: PrefixUpdate | None = None  # if they were asked for
    page_tokens: int = 0  # of a KV page; 0: not known
    continues_text: bool = False  # it goes on from the text of another one of its kind and digest: not the same bytes
    moves_sessions: bool = False  # its sessions can move to another engine of its digest, and those of one to it
    checks_sessions: bool = False  # it answers, before anything large is sent, whether it would take a session
    takes_conversations: bool = False  # it answers /v1/responses for orchestrators, which keep the conversations
    sessions_moving: int = 0  # whose move from or to another agent is not complete
    moves_prefixes: bool = False  # it gives pages of its most used prefixes to engines of its version, and takes theirs
    prefixes_left: int = 0  # that an orchestrator is sending to other agents
    adapters: tuple[LoadedAdapter, ...] = ()  # published ones
    silent_s: float = 0.0  # for which the engine has not answered the agent: its queue is that of before; 0: it answers


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose files are on this host."""

    digest: str  # of another engine's model, whose files no other agent can use: ENGINE:NAME
    names: tuple[str, ...]
    cache_level: CacheLevel  # NVME_CACHED or DRAM_CACHED
    bytes: int  # on the disk
    is_complete: bool  # false: an unfinished download
    engine: str = "starling"  # adapter


class PieceState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent has of a file that another one downloads."""

    pieces: int  # of the file, each of 8 MiB but for the last
    is_complete: bool = False  # it has all of them
    present: bytes = b""  # else: bit `piece & 7` of byte `piece >> 3` is set if it has the piece
    claimed: tuple[int, ...] = ()  # pieces that it reads from a blob store now, at most MAX_CLAIMED


class WantedUrls(msgspec.Struct, frozen=True, kw_only=True):
    """The blobs of a model whose signed URLs an agent needs next."""

    model_id: str
    keys: tuple[str, ...]  # at most MAX_URLS


class HeartbeatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an agent."""

    agent_id: str
    incarnation: str
    version: int = VERSION
    state: AgentState
    reasons: tuple[str, ...] = ()  # of DEGRADED
    lease_s: float = 0.0  # for which it serves unless its lease is renewed
    vllm_queue_length: int = 0  # of all models
    # Left out where no GPU is found, or its driver does not say it: a number would be one of a GPU.
    gpu_utilization: float | UnsetType = UNSET  # 0.0 to 1.0, mean of all GPUs of the host
    gpu_memory_free: int | UnsetType = UNSET  # bytes, of all GPUs together
    memory_free: int = 0  # bytes
    memory_available: float = 1.0  # part of the host's memory, or of its control group where that is less
    disk_free: int = 0  # bytes, of the cache's file system, without what must stay free
    max_models: int = 0  # engines at once
    download_bytes_per_s: float = 0.0  # measured; 0: no download yet
    shares_pieces: bool = False  # it gives pieces of its files to other agents, and gets them from these
    exchanges_kv_pages: bool = False  # it gives KV pages to other agents, and gets them from these
    counts_page_tenants: bool = False  # it counts all KV pages that it gets by the names of tenants
    kv_page_bytes: int = 0  # of one request's KV pages that it gives and takes; 0: not known
    takes_signed_urls: bool = False  # it has no credentials of the blob store
    wanted_urls: tuple[WantedUrls, ...] = ()
    serves_adapters: bool = False  # it loads MODEL:ADAPTER
    compiling: Progress | None = None  # kernels for the host's CPU, before a model is needed
    loaded_models: tuple[LoadedModel, ...] = ()
    cached_models: tuple[CachedModel, ...] = ()
    files_silent_s: float = 0.0  # for which the disk has not answered: `cached_models` are those of before; 0: it does


T = TypeVar("T")


def decode_request(kind: type[T], body: bytes, content_type: str) -> T:
    """A request's body. An empty one stands for `{}`. Raises `InvalidRequest` with the field."""
    plain: dict[str, Any] = parse_object(body, content_type) if body else {}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at ")
        field = where.strip("`").removeprefix("$.") or _unknown_field(reason)
        raise InvalidRequest(f"{field or 'the body'}: {reason}{_allowed(kind, field)}", field) from None


def _allowed(kind: type, field: str) -> str:
    """What a field of few values may have, for a message; "" for others."""
    hint = get_type_hints(kind).get(field)
    return f"; expected one of {', '.join(get_args(hint))}" if get_origin(hint) is Literal else ""


def _unknown_field(reason: str) -> str:
    """The field in "Object contains unknown field `x`" or "Object missing required field `x`"."""
    return reason.split("`")[1] if "field `" in reason else ""
