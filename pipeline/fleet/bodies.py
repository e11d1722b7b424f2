"""The bodies of the agent's HTTP API, JSON both ways.

    POST /load_model, /load    LoadModelRequest    -> LoadModelResponse    200 loaded; 202 still loading
    POST /unload_model         UnloadModelRequest  -> UnloadModelResponse  200
    POST /heartbeat            HeartbeatRequest    -> HeartbeatResponse    200
    POST /infer                InferRequest and more fields                the engine's answer, streamed
    GET  /health                                      {"status": "healthy"}, without a token
    GET  /metrics                                     Prometheus text
    GET  /pieces/DIGEST/CHECKSUM                      -> PieceState        200; 404: the file is not here
    GET  /pieces/DIGEST/CHECKSUM/PIECE                the bytes of a piece; 429: too many are asked for

Every call but /health carries `Authorization: Bearer TOKEN`.  Errors have the form of pipeline/api/error_response.py.
Model states are on the wire as `cache_state`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pipeline.api.json_body import parse_object
from pipeline.errors import InvalidRequest
from pipeline.fleet.records import VERSION

AgentState = Literal["IDLE", "LOADING_MODEL", "INFERRING", "DEGRADED"]
ModelState = Literal["DOWNLOADING", "LOADING_TO_GPU", "READY", "FAILED", "UNLOADED"]
# From near to far. PEER_CACHED and REMOTE are what an orchestrator finds out: no agent reports them of itself.
CacheLevel = Literal["GPU_RESIDENT", "CPU_RESIDENT", "DRAM_CACHED", "NVME_CACHED", "PEER_CACHED", "REMOTE"]

ModelId = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_CLAIMED = 64

TimeoutMs = Annotated[int, Meta(ge=0, le=86_400_000)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the requests: an unknown field is an error."""


class LoadModelRequest(Request, frozen=True, kw_only=True):
    """Load a published model. Repeated, it waits for the load that runs, or answers at once."""

    model_id: ModelId
    digest: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""  # refused if the name has another model
    wait: bool = True  # false: answer at once, with 202 while it is loading
    timeout_ms: TimeoutMs = 600_000  # of waiting; the load goes on


class UnloadModelRequest(Request, frozen=True, kw_only=True):
    """Stop the engine of a model. Streams in flight get the engine's drain time."""

    model_id: ModelId
    drop_cached: bool = False  # remove the files, too
    only_idle: bool = False  # refuse with 409 while the model has requests


class PrefixCursor(Request, frozen=True, kw_only=True):
    """How far an orchestrator knows the prefixes of one start of an engine."""

    incarnation: Annotated[str, Meta(max_length=128)]  # of the engine
    number: Annotated[int, Meta(ge=0)] = 0  # of the last change; 0: it knows none


class HeartbeatRequest(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Sent by an orchestrator, periodically. Fields at their defaults are left out: older agents refuse new ones."""

    orchestrator_id: Annotated[str, Meta(max_length=128)] = ""
    extend_lease: bool = False  # serve on for another lease while the agent cannot reach the store
    # Which models' prefixes to publish, from where. Sent to agents that say that they publish them.
    prefixes_after: Annotated[dict[ModelId, PrefixCursor], Meta(max_length=64)] = {}


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


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that has an engine, or is getting one."""

    model_id: str
    model_state: ModelState = msgspec.field(name="cache_state")
    cache_level: CacheLevel
    engine: str = "starling"  # adapter
    inference_endpoint_url: str = ""  # of chat completions; the engine's other endpoints are beside it
    engine_url: str = ""  # base: http://HOST:PORT
    engine_key: str = ""  # API key of the engine
    engine_incarnation: str = ""  # changes with each start of the engine
    # What names the bytes of answers: streams continue only on an engine where all three are equal.
    digest: str = ""  # SHA-256 of the GGUF file
    kv_type: str = ""
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
    publishes_prefixes: bool = False  # the agent can say which pages the engine's KV cache holds
    held_pages: int = 0  # of which it has published the names
    prefixes: PrefixUpdate | None = None  # if they were asked for
    continues_text: bool = False  # it goes on from the text of another one of its kind and digest: not the same bytes


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


class HeartbeatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an agent."""

    agent_id: str
    incarnation: str
    version: int = VERSION
    state: AgentState
    reasons: tuple[str, ...] = ()  # of DEGRADED
    lease_s: float = 0.0  # for which it serves unless its lease is renewed
    vllm_queue_length: int = 0  # of all models
    gpu_utilization: float = 0.0
    gpu_memory_free: int = 0  # bytes
    memory_free: int = 0  # bytes
    disk_free: int = 0  # bytes, of the cache's file system, without what must stay free
    max_models: int = 0  # engines at once
    download_bytes_per_s: float = 0.0  # measured; 0: no download yet
    shares_pieces: bool = False  # it gives pieces of its files to other agents, and gets them from these
    loaded_models: tuple[LoadedModel, ...] = ()
    cached_models: tuple[CachedModel, ...] = ()


T = TypeVar("T")


def decode_request(kind: type[T], body: bytes, content_type: str) -> T:
    """A request's body. An empty one stands for `{}`. Raises `InvalidRequest` with the field."""
    plain: dict[str, Any] = parse_object(body, content_type) if body else {}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at ")
        field = where.strip("`").removeprefix("$.") or _unknown_field(reason)
        raise InvalidRequest(f"{field or 'the body'}: {reason}", field) from None


def _unknown_field(reason: str) -> str:
    """The field in "Object contains unknown field `x`" or "Object missing required field `x`"."""
    return reason.split("`")[1] if "field `" in reason else ""
