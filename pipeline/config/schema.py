"""The shape of the configuration: every key, its type, its bounds and its default.

Knows nothing of files, the environment or messages (load.py combines them).  Frozen: resolved once, and
printed by `starling config`.  Sizes are in MiB (`_mb`), times in milliseconds (`_ms`) or seconds (`_s`).
A key that this version cannot honour is refused by rules.py, with the reason.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]  # 0: any free port
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrNone = Annotated[int, Meta(ge=0, le=1_000_000)]  # 0: no limit of its own
Megabytes = Annotated[int, Meta(ge=1, le=16_777_216)]
MegabytesOrNone = Annotated[int, Meta(ge=0, le=16_777_216)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
MillisecondsOrNone = Annotated[int, Meta(ge=0, le=86_400_000)]
Seconds = Annotated[int, Meta(ge=0, le=31_536_000)]
SessionSeconds = Annotated[int, Meta(ge=0, le=2_592_000)]  # as in requests: up to 30 days
Weight = Annotated[float, Meta(ge=0.01, le=1000.0)]
Policy = Literal["lru", "lfu", "fifo"]

MAX_DRAFT_TOKENS = 16  # of a sequence in one step; metric_families.py counts each number
DEMO_MODEL = "smollm2-135m-instruct"  # served when no model is configured, see pipeline/models/store.py


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error."""


class ServerConfig(Section, frozen=True, kw_only=True):
    """Addresses, directories and limits of the server as a whole."""

    host: str = "127.0.0.1"
    port: Port = 8080
    unix_socket: str = ""  # path of a Unix socket on which the server listens too; with host "" only there
    unix_socket_mode: Annotated[str, Meta(pattern="^0?[0-7]{3}$")] = "600"  # who may connect: 660 its group, 666 all
    tls_cert: str = ""  # PEM file: the server's certificate, then intermediate ones; "": no TLS
    tls_key: str = ""  # PEM file: its private key
    tls_client_ca: str = ""  # PEM file: who signs the certificates that clients must show; "": they need none
    # Addresses, networks (10.0.0.0/8), and unix for the Unix socket: their X-Forwarded-For and Forwarded are believed.
    trusted_proxies: tuple[str, ...] = ()
    request_timeout_ms: Milliseconds = 300_000  # of one request, including its time in queues
    max_concurrent_requests: Count = 256  # HTTP requests in flight; more get 429
    max_concurrent_per_tenant: CountOrNone = 0  # of them; without API keys, of an address; 0: three quarters
    max_connections_per_address: CountOrNone = 0  # open connections; 0: three quarters of all
    body_buffer_mb: Annotated[int, Meta(ge=2, le=65_536)] = 256  # bodies held in all; half for one tenant
    response_buffer_mb: Annotated[int, Meta(ge=64, le=65_536)] = 256  # responses being sent in all; half for a tenant
    max_body_mb: Annotated[int, Meta(ge=1, le=60)] = 8  # larger ones get 413; a frame holds 64 MiB (ipc/endpoint.py)
    sse_ping_interval_s: Annotated[int, Meta(ge=0, le=3600)] = 15  # streams: without a byte, at most; 0: any time
    enable_cors: bool = False
    enable_page: bool = True  # the page at /, and the reader of the API at /docs
    run_dir: str = ""  # sockets, status records, locks; "": STARLING_HOME/run
    state_dir: str = ""  # journal, saved pages, sessions; "": STARLING_HOME/state
    arena_dir: str = ""  # shared-memory arenas; "": a directory in /dev/shm
    journal_mb: MegabytesOrNone = 16  # requests in flight survive a restart of the gateway; 0: none
    # Idempotency keys and the answers stored for them: of each tenant, and in all.
    idempotency_ttl_s: Annotated[int, Meta(ge=120, le=86_400)] = 600  # after the answer; 120 s hold without a key too
    idempotency_tenant_mb: Annotated[int, Meta(ge=1, le=1024)] = 4
    idempotency_mb: Annotated[int, Meta(ge=1, le=16_384)] = 32
    drain_timeout_ms: MillisecondsOrNone = 4_000
    heartbeat_ms: Annotated[int, Meta(ge=10, le=60_000)] = 250
    remote_edges: bool = False  # allow tcp:// edges between machines, which then need the same key file


class AdapterConfig(Section, frozen=True, kw_only=True):
    """A LoRA adapter of a model: a GGUF file, or a directory of the PEFT library."""

    name: str  # requests name it as MODEL:NAME
    path: str


class ModelConfig(Section, frozen=True, kw_only=True):
    """One model.

    `path`: a GGUF file, a source (pipeline/models/sources.py), `catalog:NAME` for a published model, or "" for a pulled
    or demo model.
    """

    name: str
    path: str = ""
    sha256: str = ""  # of the GGUF file; checked when given
    max_batch_size: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: performance.batch_size
    max_sessions: CountOrNone = 0  # 0: cache.max_sequences
    kv_cache_mb: MegabytesOrNone = 0  # 0: cache.max_size_mb
    spill_path: str = ""  # directory for evicted pages; "": evicted pages are dropped
    spill_mb: MegabytesOrNone = 0  # limit of that directory; 0: four times the arena
    kv_type: Literal["f16", "f32", "int8"] = "f16"  # part of the model's identity
    page_tokens: Literal[16, 32, 64, 128, 256] = 32  # positions in a KV page
    max_sequence_length: Annotated[int, Meta(ge=0, le=1_048_576)] = 0  # 0: the model's own
    ranks: Annotated[int, Meta(ge=0, le=64)] = 0  # worker processes of a worker group; 0: one per core
    cpus: tuple[Annotated[int, Meta(ge=0, le=4095)], ...] = ()  # cores to pin ranks to; empty: all allowed ones
    share_cache: bool = False  # of this model, all tenants share cached pages and answers
    device: str = "cpu"
    weight: Weight = 1.0  # share of the computing time of cores that it has in common with other models
    speculate: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] = 0  # maximum draft tokens in a step; 0: off
    draft_model: str = ""  # name of a smaller model in `models` that proposes draft tokens; "": none
    pretokenizer: str = ""  # how a byte-level vocabulary splits text; "": as the file says in tokenizer.ggml.pre
    pooling: Literal["", "mean", "last", "cls", "none"] = (
        ""  # of embeddings; "": as the file says, else last; none: refused. Of a reranker ""
    )
    sampler_order: tuple[str, ...] = ()  # of requests that give none; empty: the default, see docs/api/parameters.md
    adapters: tuple[AdapterConfig, ...] = ()  # that requests may use instead of the model alone; at most 64
    max_adapter_rank: Annotated[int, Meta(ge=1, le=512)] = 64  # of an adapter's matrices; larger ones are refused
    adapters_mb: Megabytes = 1024  # of all of its adapters in memory
    chat_template: str = ""  # a Jinja template, or the path of a file with one; "": the template of the model's file
    # Marks around the reasoning of an answer: by the chat template, none, or the two marks with a space in between.
    reasoning: Annotated[str, Meta(pattern=r"^(auto|none|\S{1,64} \S{1,64})$")] = "auto"
    preload: bool = True  # loaded at the start; false: by the first request for it
    # How long it stays loaded after its last request; "": for good with `preload`, else on_demand.keep_alive.
    keep_alive: int | str = ""
    pinned: bool = False  # once loaded it stays, however long it is idle and whatever else needs the memory

    @property
    def slug(self) -> str:
        """The name, usable as a file name."""
        return self.name.replace("/", "--")


class ConstraintsConfig(Section, frozen=True, kw_only=True):
    """Grammars and schemas that outputs must match."""

    max_bytes: Annotated[int, Meta(ge=256, le=65_536)] = 65_536  # of one, as text
    compile_timeout_ms: Annotated[int, Meta(ge=100, le=600_000)] = 10_000  # of CPU time; one that takes more is refused
    memory_mb: Annotated[int, Meta(ge=256, le=1 << 20)] = 2048  # of each of the two processes that handle them
    max_cached: Annotated[int, Meta(ge=0, le=100_000)] = 256  # compiled ones that no request uses, in all
    max_cached_per_tenant: Annotated[int, Meta(ge=0, le=100_000)] = 64


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Queues, step sizes and shares."""

    max_queue_depth: Count = 1000  # waiting sequences of a model; more get 429
    batch_timeout_ms: Annotated[int, Meta(ge=0, le=1000)] = 0  # when idle, wait this long for more sequences
    max_prompt_tokens: CountOrNone = 0  # 0: limited by the context only
    max_output_tokens: CountOrNone = 0  # 0: limited by the context only
    max_step_tokens: Annotated[int, Meta(ge=16, le=16_384)] = 512  # positions computed in a step
    stuck_step_ms: Annotated[int, Meta(ge=100, le=600_000)] = 10_000  # a worker without progress is killed
    tenant_weights: dict[str, Weight] = {}  # tenants not named here have weight 1
    constraints: ConstraintsConfig = ConstraintsConfig()


class RateLimitsConfig(Section, frozen=True, kw_only=True):
    """Per tenant; 0: no limit."""

    requests_per_minute: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    tokens_per_minute: Annotated[int, Meta(ge=0, le=10_000_000_000)] = 0
    requests_per_day: Annotated[int, Meta(ge=0, le=1_000_000_000_000)] = 0  # a day begins at 00:00 UTC
    tokens_per_day: Annotated[int, Meta(ge=0, le=1_000_000_000_000)] = 0
    max_queue_depth: CountOrNone = 0  # waiting sequences of a tenant, for each model; more get 429


class ApiKey(Section, frozen=True, kw_only=True):
    """`api_keys: ["sk-..."]` stands for `{key: "sk-...", tenant: key-XXXXXXXX}`."""

    key: str
    tenant: str = ""
    weight: Weight = 1.0  # of the tenant, as in scheduler.tenant_weights
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0  # within the tenant, higher first
    admin: bool = False
    cache_salt: str = ""  # of the tenant: shares cached pages and answers with tenants of the same salt; "": its own
    share_cache: bool = False  # of the tenant: shares cached pages and answers with all tenants that do so

    @property
    def owner(self) -> str:
        """The tenant; without one, a name made from the key's digest."""
        return self.tenant or "key-" + hashlib.sha256(self.key.encode()).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"ApiKey(key={mask(self.key)!r}, tenant={self.owner!r}, admin={self.admin})"


class AuthConfig(Section, frozen=True, kw_only=True):
    """Without keys here and in the key file (`starling keys`) all requests belong to the tenant "default"."""

    api_keys: tuple[ApiKey, ...] = ()


class ResponseCacheConfig(Section, frozen=True, kw_only=True):
    """Complete answers in the gateway's memory, by everything that determines their bytes."""

    enabled: bool = False
    max_size_mb: Megabytes = 64
    max_entries: Count = 10_000
    eviction_policy: Policy = "lru"
    ttl_s: Seconds = 3600  # since the answer was computed; 0: no limit


class CacheConfig(Section, frozen=True, kw_only=True):
    """KV pages: defaults for models, and the eviction order."""

    enabled: bool = True  # keep the pages of ended requests as a prefix cache
    max_size_mb: Megabytes = 512  # of a model's KV arena, unless it gives kv_cache_mb
    eviction_policy: Policy = "lru"
    max_sequences: Count = 1000  # sessions of a model, unless it gives max_sessions
    max_sessions_per_tenant: CountOrNone = 0  # of a model; 0: half, with API keys of several tenants
    session_mb: Megabytes = 256  # tokens of a model's sessions, in memory and state_dir
    session_ttl_s: SessionSeconds = 3600  # default of sessions; 0: never closed, needs max_sessions_per_tenant
    ttl_s: Seconds = 0  # unused pages older than this are dropped; 0: never
    persist_mb: MegabytesOrNone = 512  # per model: pages saved at an orderly stop; 0: none
    warm_mb: MegabytesOrNone = 512  # per model: saved pages loaded after a start while no request runs; 0: none
    responses: ResponseCacheConfig = ResponseCacheConfig()


class StoredResponsesConfig(Section, frozen=True, kw_only=True):
    """Responses of /v1/responses and the conversations that led to them, and /v1/conversations, in state_dir."""

    ttl_s: Annotated[int, Meta(ge=60, le=31_536_000)] = 2_592_000  # since the response, or a conversation's last use
    tenant_mb: Annotated[int, Meta(ge=1, le=65_536)] = 64  # of one tenant; its oldest are dropped
    max_size_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # of all; the oldest of the largest tenant are dropped


class PerformanceConfig(Section, frozen=True, kw_only=True):
    """Batch and memory sizes."""

    batch_size: Annotated[int, Meta(ge=1, le=1024)] = 32  # sequences in a step, unless the model has max_batch_size
    memory_pool_size_mb: MegabytesOrNone = 0  # limit of a model's activations; 0: what it needs
    use_mmap: bool = True  # map the weights' files; false: read them into memory of huge pages
    weight_copies: Literal["never", "auto", "always"] = "never"  # one on each memory node; auto: if memory allows it
    worker_groups: Annotated[int, Meta(ge=1, le=64)] | Literal["auto"] = 1  # of each model; auto: one a memory node
    control_cores: Annotated[int, Meta(ge=0, le=64)] | Literal["auto"] = "auto"  # without ranks; auto: 0 of 2, 1 of 16


class LoggingConfig(Section, frozen=True, kw_only=True):
    """Form and volume of logs."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "pretty"] = "pretty"
    log_requests: bool = True
    max_size_mb: Annotated[int, Meta(ge=1, le=65_536)] = 64  # of a stage's log file, then it is rotated
    max_files: Annotated[int, Meta(ge=1, le=100)] = 3  # kept for each stage


class MetricsConfig(Section, frozen=True, kw_only=True):
    """Prometheus metrics."""

    enabled: bool = True
    endpoint: str = "/metrics"
    aliases: tuple[Literal["vllm", "llama-server"], ...] = ()  # whose names are exported as well


class OtlpConfig(Section, frozen=True, kw_only=True):
    """Traces to an OpenTelemetry collector, over HTTP. Headers and certificates: OTEL_EXPORTER_OTLP_HEADERS, ..."""

    endpoint: str = ""  # http://HOST:4318; "": off
    sample_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0  # of traces that begin here; others as their clients say
    queue: Annotated[int, Meta(ge=1, le=65_536)] = 1024  # ended requests that wait to be sent; more are dropped
    timeout_ms: Annotated[int, Meta(ge=100, le=60_000)] = 5_000  # of sending a batch, with its repetitions
    service_name: Annotated[str, Meta(min_length=1, max_length=128)] = "starling"


class TracingConfig(Section, frozen=True, kw_only=True):
    """Timelines of requests, for `starling trace` and the log of slow requests."""

    buffer_mb: Annotated[int, Meta(ge=0, le=4096)] = 4  # of ended requests, in memory; 0: none is kept
    tenant_buffer_mb: Annotated[int, Meta(ge=1, le=4096)] = 1  # of one tenant
    slow_request_ms: MillisecondsOrNone = 60_000  # a request that takes longer is logged; 0: none is
    otlp: OtlpConfig = OtlpConfig()


class FleetTlsConfig(Section, frozen=True, kw_only=True):
    """TLS between agents and orchestrators, with certificates on both sides.

    In a path, `{id}` stands for the agent's id; on an orchestrator for the word orchestrator.
    """

    cert: str = ""  # PEM file: this host's certificate (`starling fleet certificate`); "": no TLS
    key: str = ""  # PEM file: its private key
    ca: str = ""  # PEM file: the fleet's authority, which signs nothing else
    denied: str = ""  # file: certificates that are refused, by serial number or name; "": none. Needs `required`
    required: bool = False  # connections without TLS are refused; false: both kinds are used, for the roll-out


class EngineConfig(Section, frozen=True, kw_only=True):
    """A model of an agent that another program computes."""

    model: str  # as requests name it
    engine: Literal["llama-server", "vllm"]
    path: str  # a GGUF file for llama-server, a directory of Hugging Face's format for vllm
    program: str = ""  # path, or name on PATH; "": llama-server or vllm
    args: tuple[str, ...] = ()  # further arguments of the program
    memory_mb: MegabytesOrNone = 0  # that its process may allocate, mapped files aside; 0: no bound
    max_requests: Annotated[int, Meta(ge=1, le=4096)] = 64  # at once; more are refused, for another agent to take
    silent_ms: Milliseconds = 15_000  # without an answer to /health: then it is killed and started again
    answer_timeout_ms: Milliseconds = 300_000  # without a byte of an answer: then the request goes on elsewhere
    share_cache: bool = False  # of llama-server, which cannot divide it: all tenants share cached prompts


class AgentConfig(Section, frozen=True, kw_only=True):
    """`starling agent`: the process that runs engines on a host of a fleet."""

    id: str = ""  # in the coordination store; "": made from the host's name at the first start, and kept
    host: str = "127.0.0.1"  # the control API listens here
    port: Port = 8090
    tls_port: Port = 0  # for TLS, beside `port` while fleet.tls.required is false
    advertise: str = ""  # host name or address under which orchestrators reach it and its engines; "": host
    lease_ms: Annotated[int, Meta(ge=3000, le=600_000)] = 5_000  # then a silent agent is gone; its engines end before
    max_models: Annotated[int, Meta(ge=1, le=64)] = 4  # engines at once
    start_timeout_s: Annotated[int, Meta(ge=1, le=86_400)] = 600  # until an engine answers; then it is started again
    signed_urls: bool = False  # a bucket is read by URLs that orchestrators sign: this host needs no credentials of it
    compile_kernels: bool = True  # at the start, before the first model is asked for
    standby_engines: Annotated[int, Meta(ge=0, le=16)] = 1  # processes that wait to become a model's engine
    peers: bool = True  # pieces of published models go from agent to agent, besides those from fleet.blobs
    peer_connections: Annotated[int, Meta(ge=1, le=64)] = 8  # pieces that it sends to other agents at once
    peer_mb_per_s: MegabytesOrNone = 0  # that it sends to other agents; 0: no bound
    # KV pages that it gets from other agents at once, for streams that move here, and gives of one stream; 0: none
    page_mb: MegabytesOrNone = 256
    layer_streaming: bool = True  # an engine starts with a model that is still downloaded, and computes what is here
    engines: Annotated[tuple[EngineConfig, ...], Meta(max_length=64)] = ()  # models of other programs


class OrchestratorConfig(Section, frozen=True, kw_only=True):
    """`starling orchestrator`: the process that clients of a fleet talk to."""

    host: str = "127.0.0.1"  # the API listens here
    port: Port = 8081
    max_concurrent_requests: Count = 1024  # requests in flight; more get 429
    max_per_agent: Count = 192  # of them, of one model on one agent: an engine takes 192 of one client by default
    max_waiting: Count = 256  # requests that wait for models that are loading; more get 429
    poll_ms: Annotated[int, Meta(ge=10, le=60_000)] = 500  # between two polls of an agent
    silent_ms: Annotated[int, Meta(ge=100, le=600_000)] = 3_000  # then the requests of a silent agent go on elsewhere
    wait_ms: MillisecondsOrNone = 10_000  # that a new request waits for an agent
    move_timeout_ms: MillisecondsOrNone = 60_000  # that a request whose engine died waits for another one
    load_timeout_ms: Milliseconds = 600_000  # of a model
    url_valid_s: Annotated[int, Meta(ge=60, le=86_400)] = 600  # of the URLs that it signs for agents (signed_urls)
    unload_idle_ms: MillisecondsOrNone = 0  # models without a placement leave after this time idle; 0: never
    responses: str = ""  # where responses are stored; "": STARLING_HOME/responses, or nowhere (docs/fleet.md)
    # A stream of another engine that dies: another one goes on from the text so far, or the stream ends with an error
    lost_text: Literal["replay", "error"] = "replay"
    # Which of the agents that have a model ready gets a request; all but the score are for comparison
    routing: Literal["score", "least-queue", "round-robin", "random"] = "score"
    session_gain_ms: MillisecondsOrNone = 1_000  # a session moves for a turn that gains so much; 0: never
    # Weights of the terms of an agent's score, which are estimates in seconds: see docs/fleet.md.
    alpha: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.0  # start of the model
    beta: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.0  # prefill that the KV cache saves
    gamma: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.0  # queue
    delta: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.0  # transfer of the model


class KubernetesConfig(Section, frozen=True, kw_only=True):
    """The cluster of `starling fleet up --launcher kubernetes`."""

    context: str = ""  # of the kubeconfig; "": its current one
    namespace: str = "starling"
    release: str = "starling"  # name of the Helm release, and first part of the names of its objects
    values: str = ""  # file with values of the chart starling/launchers/chart; "": none


class RayConfig(Section, frozen=True, kw_only=True):
    """The Ray cluster of `starling fleet up --launcher ray`."""

    address: str = ""  # HOST:PORT of its head; "": RAY_ADDRESS, or the cluster that runs on this machine
    namespace: str = "starling"  # of the actors


class FleetConfig(Section, frozen=True, kw_only=True):
    """What the machines of a fleet share."""

    # Who is there and who holds what: sqlite:PATH (one machine), etcd://HOST:PORT or redis://HOST:PORT;
    # "": sqlite:STARLING_HOME/fleet.db
    store: str = ""
    # File with the secret that agents and orchestrators share; "": STARLING_HOME/fleet-token, made at the first start
    token: str = ""
    tls: FleetTlsConfig = FleetTlsConfig()
    # Published models: a directory, http(s)://HOST/PATH (read-only), s3://, gs:// or az://; "": STARLING_HOME/blobs
    blobs: str = ""
    blobs_endpoint: str = ""  # URL of a server that is compatible with S3, or of an Azure account; "": the cloud's own
    blobs_region: str = ""  # "": AWS_REGION, or us-east-1
    mirrors: tuple[str, ...] = ()  # further addresses of the same contents, to download from
    download_connections: Annotated[int, Meta(ge=1, le=64)] = 16  # requests at once for one model, at most
    download_mb_per_s: MegabytesOrNone = 0  # of all downloads of a process; 0: no bound
    cache_mb: MegabytesOrNone = 0  # published models on this machine; 0: bounded by free_mb only
    free_mb: MegabytesOrNone = 1024  # that downloads leave free on the disk
    agent: AgentConfig = AgentConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    launcher: Literal["local", "systemd", "kubernetes", "ray"] = "local"  # of `starling fleet up`
    kubernetes: KubernetesConfig = KubernetesConfig()
    ray: RayConfig = RayConfig()


class OnDemandConfig(Section, frozen=True, kw_only=True):
    """Models that requests load."""

    enabled: bool = True  # a request for a configured or pulled model that is not loaded loads it
    keep_alive: int | str = "5m"  # after the last request; seconds or a time like 5m; -1: never unloaded when idle
    max_models: Annotated[int, Meta(ge=0, le=1000)] = 0  # loaded at once; 0: as many as fit
    wait_ms: Milliseconds = 60_000  # for a load, of requests that are not streamed; then they get 503
    max_waiting: Count = 64  # requests that wait for loads; more get 429
    max_waiting_per_tenant: CountOrNone = 0  # without API keys of an address; 0: three quarters


class RegistryConfig(Section, frozen=True, kw_only=True):
    """Pulled models."""

    # Patterns of sources that may be fetched, redirects included: hf:my-org/*, https://models.example.org/*, file:*.
    sources: tuple[str, ...] = ("*",)


class PluginConfig(Section, frozen=True, kw_only=True):
    """A plugin of the gateway, in a process of its own. Requests pass the plugins in their order in the list."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # an entry point of `starling.plugins`
    object: str = ""  # MODULE:CLASS instead of an entry point
    options: dict[str, Any] = {}  # for its `initialize`
    on_failure: Literal["refuse", "skip"] = "refuse"  # requests for which it fails
    timeout_ms: Annotated[int, Meta(ge=10, le=600_000)] = 5_000  # of one call; then its process is ended
    start_timeout_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 60_000  # of the import and of `initialize`
    memory_mb: Annotated[int, Meta(ge=64, le=1 << 20)] = 1024  # of its process


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration. `models` is never empty: by default the demo model is served."""

    server: ServerConfig = ServerConfig()
    models: tuple[ModelConfig, ...] = ()
    scheduler: SchedulerConfig = SchedulerConfig()
    rate_limits: RateLimitsConfig = RateLimitsConfig()
    auth: AuthConfig = AuthConfig()
    cache: CacheConfig = CacheConfig()
    stored_responses: StoredResponsesConfig = StoredResponsesConfig()
    performance: PerformanceConfig = PerformanceConfig()
    logging: LoggingConfig = LoggingConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    fleet: FleetConfig = FleetConfig()
    on_demand: OnDemandConfig = OnDemandConfig()
    registry: RegistryConfig = RegistryConfig()
    plugins: tuple[PluginConfig, ...] = ()  # see docs/plugins.md
    edges: dict[str, str] = {}  # edge name (pipeline/protocol/topology.py) -> tcp:// or ipc:// address

    def model(self, name: str = "") -> ModelConfig | None:
        """The model of that name (by default the first one); None when there is none."""
        if not name:
            return self.models[0] if self.models else None
        return next((model for model in self.models if model.name == name), None)

    @property
    def preloaded(self) -> tuple[ModelConfig, ...]:
        """The models that are loaded at the start."""
        return tuple(model for model in self.models if model.preload)

    def drafts(self, name: str) -> bool:
        """Whether the model drafts for another model or has a draft model."""
        return any(one.draft_model and name in (one.name, one.draft_model) for one in self.models)

    def concurrent_per_tenant(self) -> int:
        """Most requests in flight of a tenant, or of an address without API keys."""
        total = self.server.max_concurrent_requests
        return min(
            total, self.server.max_concurrent_per_tenant or (total if len(self.tenants) == 1 else total - total // 4)
        )

    def max_batch_size(self, model: ModelConfig) -> int:
        """Most sequences in a step of the model."""
        return model.max_batch_size or self.performance.batch_size

    def max_sessions(self, model: ModelConfig) -> int:
        """Most open sessions of the model."""
        return model.max_sessions or self.cache.max_sequences

    def sessions_per_tenant(self, model: ModelConfig, n_tenants: int = 0) -> int:
        """Most open sessions of a tenant with the model. `n_tenants`: 0: those of the API keys."""
        most = self.max_sessions(model)
        is_shared = (n_tenants or len(self.tenants)) > 1
        return min(most, self.cache.max_sessions_per_tenant or (most - most // 2 if is_shared else most))

    @property
    def tenants(self) -> frozenset[str]:
        """The owners of the API keys."""
        return frozenset(key.owner for key in self.auth.api_keys)

    def kv_cache_bytes(self, model: ModelConfig) -> int:
        """Maximum size of the model's KV arena in bytes, headers included."""
        return (model.kv_cache_mb or self.cache.max_size_mb) << 20

    def tenant_salt(self, tenant: str) -> str:
        """The salt that separates the tenant's cached pages and answers; "" if it shares them with all that do so.

        A configured `cache_salt` has no control characters and so cannot equal a tenant's own salt.
        """
        key = next((key for key in self.auth.api_keys if key.owner == tenant), None)
        if key is None or key.share_cache:
            return ""
        return key.cache_salt or f"\x01{tenant}"

    def tenant_weight(self, tenant: str) -> float:
        """Share of a tenant: from `scheduler.tenant_weights`, else from its keys, else 1."""
        if tenant in self.scheduler.tenant_weights:
            return self.scheduler.tenant_weights[tenant]
        return next((key.weight for key in self.auth.api_keys if key.owner == tenant), 1.0)


def mask(secret: str) -> str:
    """A printable form of a secret: three characters at the start and two at the end, and only of long ones."""
    return f"{secret[:3]}...{secret[-2:]}" if len(secret) >= 16 else "***"
