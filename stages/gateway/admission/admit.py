"""Admission: from a `GenerationRequest` to the state of a request that can be started.

    1  the server takes requests, and neither it nor the tenant (or address) has too many in flight
    2  the tenant's request quota allows one more, whatever its body holds; the model is known and not drained
    3  the model is loaded if it is not, and ready, or becomes ready in time; from here on the request belongs to the
       version that serves now, or to the one that is being loaded for it
    4  a session's turn is begun at the KV manager
    5  prompts are tokenized; ids, lengths and the number of sequences are checked; the token quota is charged
    6  everything that determines the answer is fixed in a `RequestSpec`

Asynchronous, without sockets. Every wait is bounded by the request's deadline.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple

import msgspec

from pipeline.api import weights_header
from pipeline.api.adapter_names import adapted_digest
from pipeline.api.adapter_salt import with_adapter
from pipeline.api.generation_fields import check_configured_order
from pipeline.api.keys import Caller
from pipeline.api.output_tokens import Output, version_name
from pipeline.api.quotas import Quotas
from pipeline.api.request_name import RequestName
from pipeline.api.requests.generation_request import AdapterUse, GenerationRequest
from pipeline.api.requests.tool_fields import answer_salt
from pipeline.api.requests.tool_formats import FUNCTION, GENERIC, format_of
from pipeline.config.schema import Config
from pipeline.errors import InvalidRequest, ModelUnavailable, StarlingError
from pipeline.faults import points
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from shm.pages import NUMERICS
from stages.gateway.admission.in_flight import InFlight
from stages.gateway.admission.lengths import bound_logprobs, check_prompt_logprobs, check_text_count, output_budget
from stages.gateway.admission.prompts import check_ids, prompt_field, tokenize_prediction, tokenize_prompts
from stages.gateway.admission.server_readiness import READY_WAIT_S, ServerReadiness
from stages.gateway.reasoning.switch import prefix_of, reasoning_of
from stages.gateway.requests.continued import force_output
from stages.gateway.requests.sessions import Sessions
from stages.gateway.requests.spec import RequestSpec, SequenceSpec
from stages.gateway.requests.state import RequestState
from stages.gateway.tokenizer_client import RETRY_AFTER_S, TextOwner, TokenizerClient
from stages.gateway.tool_calls.call_grammar import answer_constraint
from stages.gateway.tracing.recorder import Recorder
from stages.gateway.tracing.timeline import Fact, RequestTrace, ms
from stages.gateway.tracing.trace_context import TraceContext
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.loaded_versions import LoadedVersions
from stages.gateway.versions.on_demand import OnDemand

NOTABLE_S = 0.001  # a shorter wait for a model is not in the timeline


class _Call(NamedTuple):
    """The HTTP call that a request came with."""

    caller: Caller
    started_at: float  # s, monotonic
    client_id: str  # X-Request-Id
    name: RequestName  # of the request that it becomes
    trace: RequestTrace | None  # its timeline
    context: TraceContext | None
    adapter: str = ""  # name of the LoRA adapter that it asks for
    weights: str = ""  # digest of those that alone may compute it; "": any
    principal: str = ""  # whom bounds on requests apply to


class Admission:
    """One per gateway. `clock` is monotonic, `wall` and `steady` are s since 1970.

    `steady` ignores changes of the system's clock: a successor of this process compares deadlines with it.
    """

    def __init__(
        self,
        config: Config,
        catalog: VersionCatalog,
        loaded: LoadedVersions,
        readiness: ServerReadiness,
        in_flight: InFlight,
        quotas: Quotas,
        sessions: Sessions,
        tokenizer: TokenizerClient,
        clock: Callable[[], float],
        wall: Callable[[], float],
        steady: Callable[[], float],
        draw_seed: Callable[[], int],
        timelines: Recorder,
        on_demand: OnDemand,
    ) -> None:
        self._timelines = timelines
        self._on_demand = on_demand
        self._received = points.fault_point("gateway", "received")
        self._config = config
        self._catalog = catalog
        self._loaded = loaded
        self._readiness = readiness
        self._in_flight = in_flight
        self._quotas = quotas
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._clock = clock
        self._wall = wall
        self._steady = steady
        self._draw_seed = draw_seed
        self._timeout_s = config.server.request_timeout_ms / 1000

    @contextmanager
    def slot(self, principal: str) -> Iterator[None]:
        """Count a new request among those in flight. Raises `Overloaded`, or why the server takes no requests."""
        if refusal := self._readiness.refusal():
            raise refusal
        with self._in_flight.counted(principal):
            yield

    @contextmanager
    def serving_version(self, model: str) -> Iterator[ModelVersion]:
        """The version of the model that takes requests now; it stays loaded meanwhile. Raises `ModelUnavailable`."""
        version = self._on_demand.usable(model)
        if version is None:
            reason = self._readiness.problem(model) or f"model {model} is not loaded"
            raise ModelUnavailable(reason, retry_after_s=RETRY_AFTER_S)
        with self._in_flight.using(version.id):
            yield version

    async def ensure_loaded(
        self,
        model: str,
        caller: Caller,
        principal: str,
        left_s: float,
        *,
        is_streamed: bool = False,
        needs_serving: bool = False,
        keep_alive: float | None = None,
    ) -> None:
        """Wait until a version of the model takes requests; load the model if no request has done so.

        principal: whose share of the places of waiting requests it takes.  left_s: of the request's time.  keep_alive:
        how long the model stays after the request, as the client gives it (s).  Raises `StarlingError`.
        """
        with self._in_flight.admitting(model):  # else an idle model could be unloaded before it is used
            await self._on_demand.version(model, principal, left_s, is_streamed, needs_serving)
            self._on_demand.used(model, caller.tenant, keep_alive)
            if self._catalog.serving(model) is not None:
                await self._readiness.wait_ready(model, min(READY_WAIT_S, left_s))

    def charge_attempt(self, caller: Caller) -> None:
        """Charge a request to its tenant before its body is read. Raises `RateLimited`."""
        self._quotas.take_request(caller.tenant, caller.key_id)

    def charge_tokens(self, caller: Caller, tokens: int) -> None:
        """Charge the tokens that a request converts without generating any. Raises `RateLimited`."""
        self._quotas.take_prompt(caller.tenant, tokens, caller.key_id)

    def rate_limit_headers(self, caller: Caller) -> dict[str, str]:
        """The headers that tell a client what is left of its quotas; none without quotas."""
        return self._quotas.headers(caller.tenant, caller.key_id)

    async def admit(
        self,
        generation: GenerationRequest,
        caller: Caller,
        started_at: float,
        client_id: str = "",
        name: RequestName | None = None,
        context: TraceContext | None = None,
        weights: str = "",
        principal: str = "",
    ) -> RequestState:
        """The request, ready to be started. Raises `StarlingError`. The caller holds a `slot`.

        `weights`: see pipeline/api/weights_header.py.  `principal`: as in `ensure_loaded`; "": the caller's.
        """
        self._received.count()
        model, adapter = self._catalog.resolve_adapter(generation.model)
        name = name or RequestName(f"req-{secrets.token_hex(12)}")
        trace = self._timelines.begin(
            name.id, started_at, tenant=caller.tenant, model=model, client_id=client_id or name.id, context=context
        )
        try:
            call = _Call(
                caller, started_at, client_id, name, trace, context, adapter, weights, principal or caller.principal
            )
            state = await self._admit(model, generation, call)
        except BaseException:
            self._timelines.withdraw(trace)
            raise
        self._timelines.attach(state, trace)
        return state

    async def _admit(self, model: str, generation: GenerationRequest, call: _Call) -> RequestState:
        started_at = call.started_at
        if call.name.salt:
            salted = call.name.salted(generation.cache_salt)
            generation = msgspec.structs.replace(generation, cache_salt=salted)
        if refusal := self._readiness.drains.rejection(model) or self._readiness.unloading(model):
            raise refusal
        with self._in_flight.admitting(model):
            left_s = started_at + self._timeout_s - self._clock()
            began = self._clock()
            await self.ensure_loaded(
                model,
                call.caller,
                call.principal,
                left_s,
                is_streamed=generation.stream or generation.is_in_background,
                needs_serving=generation.session_id is not None or bool(call.adapter),
                keep_alive=generation.kept_alive_s,
            )
            self._record(call.trace, "model ready", began, NOTABLE_S)
            try:
                async with asyncio.timeout(started_at + self._timeout_s - self._clock()):
                    with self.serving_version(model) as version:
                        return await self._admit_to(version, generation, call)
            except TimeoutError:
                raise StarlingError(
                    "TIMEOUT",
                    f"not begun after {self._timeout_s:.1f} s, the time a request may take "
                    f"(server.request_timeout_ms); try again when it is less busy",
                ) from None

    def force_output(self, request: RequestState, output: Output) -> None:
        """The answer goes on from another server's tokens. Raises `InvalidRequest`, `ModelUnavailable`."""
        described, version = self._loaded.described[request.spec.version], self._catalog.get(request.spec.version)
        kv_type = f"{version.settings.kv_type}{described.revision}" if version is not None else ""
        name = version_name(identity_of(described.digest, request.spec.generation), kv_type, NUMERICS)
        context = self._loaded.bounds(version).context if version is not None else 0
        force_output(request, output, name, described.vocab_size, context, self._clock())

    async def _admit_to(self, version: ModelVersion, generation: GenerationRequest, call: _Call) -> RequestState:
        """Begin the session's turn, if there is one, and abort it if the request is not admitted."""
        caller = call.caller
        is_shared = version.settings.share_cache
        salt = generation.cache_salt if is_shared else caller.salted(generation.cache_salt)
        if call.adapter:
            digest = self._loaded.adapter_digest(version, call.adapter)
            generation = msgspec.structs.replace(generation, adapter=AdapterUse(call.adapter, digest))
            salt = with_adapter(salt, digest)
        if call.weights:
            weights_header.check(
                call.weights, identity_of(self._loaded.described[version.id].digest, generation), generation.model
            )
        if generation.session_id is None:
            generation = msgspec.structs.replace(generation, cache_salt=salt)
            return await self._build(version, generation, (), call)
        if generation.session_ttl_s == 0 and not self._config.cache.max_sessions_per_tenant:
            raise InvalidRequest(
                "session_ttl_s is 0; a session that never expires needs cache.max_sessions_per_tenant in the server's "
                "configuration: give at least 1 s",
                "session_ttl_s",
            )
        if generation.session_ttl_s is None:
            generation = msgspec.structs.replace(generation, session_ttl_s=self._config.cache.session_ttl_s)
        began = self._clock()
        generation, held = await self._sessions.begin(version.name, caller.tenant, generation, salt, version.id)
        self._record(call.trace, "session", began, stage="kv", facts={"tokens": len(held)})
        try:
            return await self._build(version, generation, held, call)
        except BaseException:
            if generation.turn is not None:
                self._sessions.abort(version.name, caller.tenant, generation.turn)
            raise

    async def _build(
        self, version: ModelVersion, generation: GenerationRequest, held: tuple[int, ...], call: _Call
    ) -> RequestState:
        """Check everything that depends on the model. `held`: the tokens of the session before the prompt."""
        described = self._described(version)
        if not described.generates:
            raise InvalidRequest(
                f"model {version.name!r} has embeddings alone and generates no text: send it to /v1/embeddings, "
                f"/v1/rerank or /v1/score, or use another model",
                "model",
            )
        created = call.name.created or int(self._wall())
        if generation.messages is not None and not generation.template_date:
            local = datetime.fromtimestamp(created).isoformat()
            generation = msgspec.structs.replace(generation, template_date=local)
        self._check_constraint(generation)
        check_text_count(max(1, len(generation.prompts)), generation.n, self._config, version.settings)
        bounds = self._loaded.bounds(version)
        began = self._clock()
        owner = TextOwner(call.name.id, call.caller.tenant, generation.turn.session if generation.turn else "")
        prompts = await tokenize_prompts(generation, version, described, self._tokenizer, bounds, len(held), owner)
        self._record(call.trace, "tokenized", began, stage="tokenizer", facts={"tokens": sum(map(len, prompts))})
        check_ids(generation, prompts, described.vocab_size)
        if held:
            prompts = [held + prompt for prompt in prompts]
        budgets = [
            output_budget(
                len(prompt),
                generation.max_tokens,
                bounds,
                prompt_field(generation, index),
                generation.max_tokens_field,
                ends_at_context=generation.endpoint == "messages",
            )
            for index, prompt in enumerate(prompts)
        ]
        if generation.logprobs:
            budgets = bound_logprobs(
                budgets,
                generation.n,
                generation.sampling.logprobs,
                generation.max_tokens_field,
                is_given=generation.max_tokens is not None,
            )
        if (top := generation.prompt_logprobs) is not msgspec.UNSET:
            is_echo = generation.echo and not generation.shows_prompt_logprobs
            field = "logprobs" if is_echo else "prompt_logprobs"
            check_prompt_logprobs(generation.n * sum(map(len, prompts)), top, field)
        await self._check_breakers(generation.sampling, described.tokenizer or version.id)
        echoes = [
            given if isinstance(given, str) else await self._tokenizer.decode(version.id, given, owner=owner)
            for given in (generation.prompts if generation.echo else [])
        ]
        generation = await self._with_end_ids(generation, described, version.id, owner)
        prediction = await tokenize_prediction(generation, version.id, self._tokenizer, bounds, owner)
        self._described(version)  # its load may have failed meanwhile
        self.charge_tokens(call.caller, sum(map(len, prompts)))
        return self._state(version, described, generation, prompts, budgets, echoes, created, prediction, call)

    def _described(self, version: ModelVersion) -> m.Described:
        """The version's description. Raises `ModelUnavailable` if its load has failed."""
        described = self._loaded.described.get(version.id)
        if described is None:
            raise ModelUnavailable(f"model {version.name!r} could not be loaded", "model", retry_after_s=RETRY_AFTER_S)
        return described

    async def _with_end_ids(
        self, generation: GenerationRequest, described: m.Described, version_id: str, owner: TextOwner
    ) -> GenerationRequest:
        """The request with the tokens that end its reasoning, if that has a budget."""
        thinking = generation.thinking
        if not thinking or not thinking.budget or len(described.reasoning) != 2:
            return generation
        encoded = await self._tokenizer.encode(
            version_id, described.reasoning[1], parse_special=True, add_bos=False, owner=owner
        )
        return msgspec.structs.replace(
            generation, thinking=msgspec.structs.replace(thinking, end_ids=tuple(encoded.tokens))
        )

    def _record(
        self,
        trace: RequestTrace | None,
        name: str,
        began: float,
        least_s: float = 0.0,
        *,
        stage: str = "gateway",
        facts: dict[str, Fact] | None = None,
    ) -> None:
        """Add a part of the admission that has just ended to the timeline, if it took `least_s`."""
        now = self._clock()
        if trace is not None and now - began >= least_s:
            pid = -1 if stage == "gateway" else self._timelines.pid(stage)
            trace.add(now, name, {"ms": ms(now - began), **(facts or {})}, stage=stage, pid=pid)

    def _check_constraint(self, generation: GenerationRequest, what: str = "") -> None:
        bound = self._config.scheduler.constraints.max_bytes
        if generation.constraint and len(generation.constraint.text.encode()) > bound:
            field = generation.constraint.field
            raise InvalidRequest(
                f"{field} {what}has more than {bound} bytes (scheduler.constraints.max_bytes): shorten it", field
            )

    async def _check_breakers(self, sampling: m.Sampling, vocabulary_id: str) -> None:
        """Find the tokens that are sequence breakers: in a thread, as it takes milliseconds the first time."""
        texts = sampling.dry_sequence_breakers
        vocabulary = self._loaded.vocabularies.get(vocabulary_id)
        if not sampling.dry_multiplier or not vocabulary:
            return
        (await asyncio.to_thread(vocabulary.breakers, texts)).checked(texts)

    def _state(
        self,
        version: ModelVersion,
        described: m.Described,
        generation: GenerationRequest,
        prompts: list[tuple[int, ...]],
        budgets: list[int],
        echoes: list[str],
        created: int,
        prediction: bytes,
        call: _Call,
    ) -> RequestState:
        """Fix the specification. `budgets`: most output tokens of each prompt."""
        seed = generation.seed if generation.seed is not None else call.name.seed
        if seed is None:
            seed = self._draw_seed()
        if not (order := generation.sampling.order):
            order = version.settings.sampler_order
            check_configured_order(generation.sampling, order)
        sampling = msgspec.structs.replace(generation.sampling, seed=seed, order=order)
        stops = generation.stop_token_ids
        if not sampling.ignore_eos:
            stops = (*described.eos_ids, *(described.fim_ends if generation.suffix else ()), *stops)
        stop_ids = tuple(dict.fromkeys(stops))
        distinct: dict[bytes, int] = {}
        sequences = []
        for index, (prompt, budget) in enumerate(zip(prompts, budgets)):
            at = distinct.setdefault(array("i", prompt).tobytes(), len(distinct))
            sequences += [SequenceSpec(at, index, choice, budget, sampling, stop_ids) for choice in range(generation.n)]
        deadline = call.started_at + self._timeout_s
        if tools := generation.tools:
            salt = answer_salt(distinct, 0 if sampling.temperature == 0 else seed, described.digest)
            definitions = generation.template.tools if generation.template else None
            form = described.tool_format or GENERIC
            types = tools.types if FUNCTION in format_of(form).openers else ()
            tools = msgspec.structs.replace(tools, format=form, salt=salt, types=types)
            if definitions:
                constraint = answer_constraint(tools, definitions, generation.constraint or None)
                generation = msgspec.structs.replace(generation, constraint=constraint or msgspec.UNSET)
                self._check_constraint(generation, "with the schemas of the tools ")
        if generation.messages is not None and described.reasoning:
            generation = self._with_reasoning(generation, described, version.id, prompts[0])
        spec = RequestSpec(
            id=call.name.id,
            tenant=call.caller.tenant,
            model=version.name,
            digest=described.digest,
            numerics=NUMERICS,
            generation=msgspec.structs.replace(
                generation,
                prompts=[],
                messages=None,
                template=msgspec.UNSET,
                tools=tools,
                suffix=msgspec.UNSET,
                thinking=msgspec.UNSET,
                prediction=msgspec.UNSET if generation.prediction is msgspec.UNSET else "",
            ),
            seed=seed,
            created=created,
            fingerprint=f"fp_{identity_of(described.digest, generation)[:12]}",
            deadline=self._steady() + deadline - self._clock(),
            priority=call.caller.priority - (generation.priority or 0),
            client_id=call.client_id or call.name.id,
            prompts=tuple(distinct),
            echoes=tuple(echoes),
            sequences=tuple(sequences),
            version=version.id,
            tokenizer=described.tokenizer,
            api_key_id=call.caller.key_id,
            trace=call.context,
            prediction=prediction,
            kv_revision=described.kv_revision,
        )
        return RequestState(spec, deadline, call.started_at)

    def _with_reasoning(
        self, generation: GenerationRequest, described: m.Described, version_id: str, prompt: tuple[int, ...]
    ) -> GenerationRequest:
        """The request with what its answer's reasoning is; a constraint begins to count after it."""
        vocabulary, thinking = self._loaded.vocabularies[described.tokenizer or version_id], generation.thinking
        continues = generation.template.continue_final_message if generation.template else False
        last = str((generation.messages or [{}])[-1].get("content", ""))
        reasoning = reasoning_of(thinking, described, prompt, vocabulary, last, continues=continues)
        constraint = generation.constraint
        if reasoning and constraint:
            reasoning = msgspec.structs.replace(reasoning, keeps_space=True)
            after = prefix_of(reasoning, thinking, prompt, vocabulary)
            constraint = msgspec.structs.replace(constraint, after=after)
        return msgspec.structs.replace(generation, reasoning=reasoning, constraint=constraint)


def identity_of(digest: str, generation: GenerationRequest) -> str:
    """SHA-256 (hex) of the weights that compute a request: the model's digest, or that of model and adapter."""
    if not generation.adapter:
        return digest
    return adapted_digest(digest, generation.adapter.digest)
