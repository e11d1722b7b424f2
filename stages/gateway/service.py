"""From a valid ask to a request in flight: models, readiness and admission.

Asynchronous, without sockets: frames leave through the two functions it is given, answers come in through
`on_tokenizer` and `on_scheduler`.  Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from pipeline.api.keys import Caller
from pipeline.api.quota_file import QuotaFile
from pipeline.api.quotas import Quotas
from pipeline.config.schema import Config
from pipeline.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    NotFound,
    Overloaded,
    StarlingError,
)
from pipeline.models.versions import ModelVersion, initial
from pipeline.observe.metrics import Metrics
from pipeline.protocol import messages as m
from stages.gateway.admission.drain import ALL, Drains, too_late
from stages.gateway.admission.lengths import Bounds, check_number, output_budget
from stages.gateway.admission.readiness import StageHealth, model_report
from stages.gateway.endpoints.generation_request import GenerationRequest
from stages.gateway.metrics import GatewayMetrics
from stages.gateway.requests.event_cursor import TOKENS, EventCursor
from stages.gateway.requests.journal import Journal
from stages.gateway.requests.prompts import check_ids, field_of, tokens_of
from stages.gateway.requests.recovery import CatchUpWaiter, Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.response_cache import (
    BYPASS,
    HIT,
    MISS,
    Line,
    ResponseCache,
    is_determined,
    key_of,
    lines_of,
)
from stages.gateway.requests.sessions import Sessions
from stages.gateway.requests.state import Outcome, RequestState, SequenceState, Sink
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.tokenizer_client import RETRY_AFTER_S, TokenizerClient
from stages.gateway.versions.catalog import VersionCatalog

log = logging.getLogger("starling.gateway")

READY_WAIT_S = 10.0  # a request waits this long for a stage that is coming back, then gets 503
COUNTED_AT_ONCE = 512  # tokens of a reader's place: with long stop strings some 10 ms
MAX_OLD_VOCABULARIES = 2  # of versions that are gone; answers that were given by them can be asked for again


AnySink = TypeVar("AnySink", bound=Sink)


class Service:
    """One per process. `relay` holds the requests in flight."""

    def __init__(
        self,
        config: Config,
        send_scheduler: Callable[[m.Frame], bool],
        send_tokenizer: Callable[[m.Frame], bool],
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(53),
        metrics: Metrics | None = None,
        journal: Journal | None = None,
        wall: Callable[[], float] = time.time,
        send_kv: Callable[[m.Frame], bool] = lambda frame: False,
        quota_file: QuotaFile | None = None,
        instances: VersionCatalog | None = None,
    ) -> None:
        self.config = config
        self.instances = instances or VersionCatalog(config, initial(config), lambda version_table: None)
        self.clock = clock
        self.relay = Relay(send_scheduler, clock, self._on_end, lambda request: self.sessions.finish(request))
        self.sessions = Sessions(self.relay, send_kv)
        self.recovery = Recovery(self.relay, journal, clock, wall, config.server.request_timeout_ms / 1000)
        self.quotas = Quotas(config.rate_limits, clock, quota_file, wall)
        self.responses = ResponseCache(config.cache.responses, clock)
        heartbeat_s = config.server.heartbeat_ms / 1000
        self.tokenizer = StageHealth("tokenizer", clock, heartbeat_s)
        self.scheduler = StageHealth("scheduler", clock, heartbeat_s)
        self.kv = StageHealth("kv", clock, heartbeat_s)
        self.described: dict[str, m.Described] = {}  # by instance, and so are the states
        self.states: dict[str, m.ModelState] = {}
        self.refused: dict[str, StarlingError] = {}  # what the tokenizer said last of versions being loaded
        self.metrics = GatewayMetrics(metrics or Metrics("gateway", None, clock=clock), clock)
        self.in_flight = 0  # requests being admitted or served
        self.is_draining = False  # the process is told to stop
        self.is_leaving = False  # the next request of a connection is for a successor
        self.drains = Drains(clock)  # asked for by an operator
        self._admitting: Counter[str] = Counter()  # by model: not in the relay yet
        self._using: Counter[str] = Counter()  # by instance: those that will be, and questions about text
        self.questions = TokenizerClient(send_tokenizer)
        self._draw_seed = draw_seed
        self._changed: asyncio.Future[None] | None = None  # set and replaced when readiness may differ

    # ---------------------------------------------------------------- models and readiness

    def model_name(self, asked: str) -> str:
        """Its name; "" asks for the first. Raises `ModelNotFound`."""
        names = self.instances.names
        name = asked or (*names, *(one.name for one in self.instances.all), "")[0]
        if not self.instances.versions(name):
            close = difflib.get_close_matches(asked, names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "served: " + (", ".join(map(repr, names)) or "none")
            raise ModelNotFound(f"there is no model {asked!r}; {hint}", "model")
        return name

    def problem(self, model: str) -> str:
        """Why the model cannot take a request now; "" when it can."""
        if reason := self.drains.reason(model):
            return reason
        # A kv that is not there is the scheduler's to tell: a model is not ready without it.
        for health in (self.tokenizer, self.scheduler, *([self.kv] if self.kv.is_up else [])):
            if problem := health.problem:
                return f"{health.stage}: {problem}"
        serving = self.instances.serving(model)
        if serving is None:
            return f"model {model} is being {'unloaded' if self.instances.is_unloading(model) else 'loaded'}"
        if serving.id not in self.described:
            return "tokenizer: the model is not described yet"
        state = self.states.get(serving.id)
        if state is None or not state.ready:
            return f"model {model}: {model_report(state)['reason']}"
        return ""

    def is_ready(self, instance: ModelVersion) -> bool:
        """Could that version take requests?"""
        state = self.states.get(instance.id)
        return instance.id in self.described and state is not None and state.ready

    @contextmanager
    def using(self, model: str) -> Iterator[ModelVersion]:
        """The version of it that serves now; it stays until this is over. Raises `ModelUnavailable`."""
        instance = self.instances.serving(model)
        if instance is None:
            raise ModelUnavailable(self.problem(model) or f"model {model} is not loaded", retry_after_s=RETRY_AFTER_S)
        self._using[instance.id] += 1
        try:
            yield instance
        finally:
            self._using[instance.id] -= 1
            if not self._using[instance.id]:
                del self._using[instance.id]

    def readiness(self) -> dict[str, Any]:
        """Each stage's own state, each model's, and the conclusion."""
        models: dict[str, dict[str, Any]] = {}
        for name in self.instances.names:
            serving = self.instances.serving(name)
            models[name] = model_report(self.states.get(serving.id) if serving is not None else None)
            if serving is None:
                models[name]["reason"] = "it is being loaded"
        for name, report in models.items():
            if drained := self.drains.reason(name):
                report |= {"ready": False, "reason": drained}
        # One that is only being loaded makes nobody wait who does not ask for it.
        problems = [self.problem(name) for name in models if self.instances.serving(name) is not None]
        if not problems:
            problems = [f"model {name} is being loaded" for name in models] or ["no model is loaded"]
        is_overloaded = self.in_flight >= self.config.server.max_concurrent_requests
        closed = "draining" if self.is_draining else self.drains.reason()
        reason = closed or next(filter(None, problems), "")
        if not reason and is_overloaded:
            reason = f"{self.in_flight} requests are in flight, the most that are taken"
        return {
            "ready": not reason,
            "reason": reason or None,
            "stages": {
                "gateway": {
                    "ready": not closed and not is_overloaded,
                    "reason": closed or ("overloaded" if is_overloaded else None),
                    "in_flight": self.in_flight,
                },
                "tokenizer": self.tokenizer.report(),
                "scheduler": self.scheduler.report(),
                "kv": self.kv.report(),
            },
            "models": models,
        }

    def notice_change(self) -> None:
        """Wake those who wait for a stage or model."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def wait_ready(self, model: str, wait_s: float = READY_WAIT_S) -> None:
        """Raises `ModelUnavailable` with the reason."""
        await self._wait(lambda: self.problem(model), wait_s, model)

    async def _wait(self, problem: Callable[[], str], wait_s: float, model: str) -> None:
        deadline = self.clock() + wait_s
        while reason := problem():
            if self.is_draining:
                raise _draining()
            if refusal := self.drains.refusal(model) or self._leaving(model):
                raise refusal
            left = deadline - self.clock()
            if left <= 0:
                raise ModelUnavailable(
                    f"the server is not ready ({reason}); try again in {RETRY_AFTER_S:.0f} s",
                    retry_after_s=RETRY_AFTER_S,
                )
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._changed}, timeout=min(left, 0.5))

    def _leaving(self, model: str) -> StarlingError | None:
        """Why a model that goes takes no requests. Raises `ModelNotFound` when it is gone."""
        if not self.instances.is_unloading(self.model_name(model)):
            return None
        message = f"model {model} is being unloaded and takes no more requests"
        return StarlingError("DRAINING", message, "model", retry_after_s=RETRY_AFTER_S)

    # ---------------------------------------------------------------- frames and ticks

    def on_tokenizer(self, frame: m.Frame) -> None:
        match frame:
            case m.TokenizerFailed():
                error = StarlingError(frame.code, frame.message, frame.param, retry_after_s=RETRY_AFTER_S)
                self.questions.answer(frame.id, error)
            case m.Encoded() | m.Described() | m.Detokenized():
                self.questions.answer(frame.id, frame)

    def on_scheduler(self, frame: m.Frame) -> None:
        match frame:
            case m.Tokens():
                self.relay.on_tokens(frame)
            case m.Rejected():
                self.relay.on_rejected(frame)
            case m.SchedulerState():
                for state in frame.models:
                    if self.instances.get(state.model) is None:
                        continue  # on its way out
                    known = self.states.get(state.model)
                    self.states[state.model] = state
                    if known is None or known.ready != state.ready:
                        self.notice_change()

    def on_tokenizer_up(self, hello: m.Hello) -> None:
        """A new incarnation: it is asked everything that is open."""
        self.tokenizer.up()
        self.questions.on_up()
        self.notice_change()

    def on_tokenizer_down(self, hello: m.Hello) -> None:
        self.tokenizer.down()

    def on_scheduler_up(self, hello: m.Hello) -> None:
        """A new incarnation: it gets every sequence again."""
        self.scheduler.up()
        self.states.clear()
        self.relay.on_scheduler_up()
        self.notice_change()

    def on_scheduler_down(self, hello: m.Hello) -> None:
        self.scheduler.down()
        self.states.clear()

    def on_kv_up(self, hello: m.Hello) -> None:
        self.kv.up()
        self.sessions.on_up(hello)

    def on_kv_down(self, hello: m.Hello) -> None:
        self.kv.down()
        self.sessions.on_down(hello)

    def tick(
        self,
        tokenizer_beat: m.Heartbeat | None,
        scheduler_beat: m.Heartbeat | None,
        kv_beat: m.Heartbeat | None = None,
    ) -> None:
        """Every 100 ms."""
        stages = (self.tokenizer, self.scheduler, self.kv)
        before = [bool(stage.problem) for stage in stages]
        for stage, beat in zip(stages, (tokenizer_beat, scheduler_beat, kv_beat)):
            stage.beat(beat)
        self.questions.tick()
        self.relay.tick()
        self.sessions.tick()
        for drain in self.drains.due():
            drain.ended += self.end_all(too_late(drain), "" if drain.target == ALL else drain.target)
        if not self.is_draining:
            self.recovery.tick(self.described, self.instances)
        self.responses.expire()
        self.sample()
        if self.tokenizer.is_up and not self.tokenizer.problem:
            for instance in self.instances.all:
                if instance.id not in self.described:
                    known = tuple(name for name, pieces in self.relay.pieces.items() if pieces)
                    self.questions.describe(instance.id, known, partial(self._on_described, instance))
        if before != [bool(stage.problem) for stage in stages]:
            self.notice_change()

    def sample(self) -> None:
        """Bring the metrics up to date."""
        self.metrics.sample(self.in_flight, self.relay.counts, self.recovery.left_out)
        if self.responses.is_enabled:
            self.metrics.sample_responses(self.responses, [model.name for model in self.config.models])

    def _on_described(self, instance: ModelVersion, done: asyncio.Future[m.Described]) -> None:
        if done.cancelled() or self.instances.get(instance.id) is None:
            return
        error = done.exception()
        if error is None:
            try:
                self.on_description(instance.id, done.result())
            except ValueError as reason:
                error = InternalError(f"its vocabulary cannot be used: {reason}")
        if error is None:
            return
        if isinstance(error, StarlingError) and instance.state == "loading":
            self.refused[instance.id] = error
        else:
            log.warning("model %s is not described: %s", instance.id, error)

    def on_description(self, instance_id: str, described: m.Described) -> None:
        """With its pieces, unless they are here; those may have gone meanwhile, then it is asked again."""
        pieces = self.relay.pieces.setdefault(described.tokenizer or instance_id, TokenBytes())
        if not pieces and described.piece_ends:
            pieces.fill(described)
        if pieces:
            bare = msgspec.structs.replace(described, pieces=b"", piece_ends=b"", control=b"")
            self.described[instance_id] = bare
            self.notice_change()

    def forget(self, instance_id: str) -> None:
        """That version is gone."""
        self.described.pop(instance_id, None)
        self.states.pop(instance_id, None)
        self.refused.pop(instance_id, None)
        self._forget_vocabularies()
        self.questions.forget(instance_id)
        self.notice_change()

    def _forget_vocabularies(self) -> None:
        """All that no version has, but those used last."""
        tables = self.relay.pieces
        in_use = {known.tokenizer or name for name, known in self.described.items()}
        # One that is empty is waited for by a reader; there are no more of them than requests of the journal.
        old = [name for name, pieces in tables.items() if pieces and name not in in_use]
        used = [name for name in old if tables[name].is_used]
        for name in {*old} - {*used[-MAX_OLD_VOCABULARIES:]}:
            del tables[name]

    # ---------------------------------------------------------------- what the tokenizer knows

    async def describe(self, instance: ModelVersion) -> m.Described:
        """Raises `ModelUnavailable` when the tokenizer does not come up in time."""
        known = self.described
        await self._wait(
            lambda: "" if instance.id in known else self.tokenizer.problem or "the model is not described",
            READY_WAIT_S,
            instance.name,
        )
        return known[instance.id]

    async def received(self, request: RequestState, mark: EventCursor) -> list[int]:
        """For each choice the characters that a reader has who has got as far as `mark`.

        Raises `Conflict` when nobody knows any more how to read the request's tokens.
        """
        counts = [0] * len(request.sequences)
        for sequence, place in zip(request.sequences, mark.places):
            tokens = min(place.tokens, sequence.end)
            if place.level != TOKENS or not tokens:
                continue
            if tokens == sequence.end and not sequence.is_flushed:
                counts[sequence.index] = sequence.text_length
            else:
                counts[sequence.index] = await self._length(request, sequence.tokens[:tokens])
        return counts

    async def _length(self, request: RequestState, tokens: list[int]) -> int:
        """Characters that are certain after these first tokens. Others have their turn meanwhile."""
        pieces = self.relay.pieces.get(request.vocabulary)
        if not pieces:
            raise Conflict(
                f"the vocabulary that {request.id} was written in is not here any more, and this answer cannot be gone "
                f"on with from the middle; GET /v1/requests/{request.id} without Last-Event-ID has all of it",
                "Last-Event-ID",
            )
        decoder = StreamDecoder(request.ask.stop)
        skip_special, length = request.ask.skip_special, 0
        for at in range(0, len(tokens), COUNTED_AT_ONCE):
            for token in tokens[at : at + COUNTED_AT_ONCE]:
                length += len(decoder.push(pieces.shown(token, skip_special)))
            await asyncio.sleep(0)
        return length

    # ---------------------------------------------------------------- requests again

    def open(self, request: RequestState) -> None:
        """Begin an admitted request that has its sink."""
        self.sessions.open(request)
        digest = self.described[request.instance].digest
        self.recovery.open(request, digest, self._kept_answer(request, digest))

    def _kept_answer(self, request: RequestState, digest: str) -> list[Line] | None:
        """From the response cache; None: it is to be computed."""
        if not self.responses.is_enabled:
            return None
        instance = self.instances.get(request.instance)
        if instance is None or not is_determined(request):
            request.response_cache = BYPASS
            return None
        key = key_of(request, digest, instance.settings.kv_type)
        lines = self.responses.get(key)
        request.response_cache = MISS if lines is None else HIT
        if lines is None:
            request.response_key = key
        self.metrics.looked_up(request)
        return lines

    def find(self, request_id: str, tenant: str, mark: EventCursor | None = None) -> RequestState:
        """A request to be taken up at `mark`. Raises `NotFound`, also for what another tenant has."""
        request = self.recovery.find(request_id, tenant)
        if request is None:
            raise NotFound(f"there is no request {request_id[:80]!r} (any more); an ended one is kept for a short time")
        if mark is not None and len(mark.places) != len(request.sequences):
            raise InvalidRequest(
                f"Last-Event-ID has {len(mark.places)} places and the request {len(request.sequences)} "
                f"choices; send the id of the last event as it was received",
                "Last-Event-ID",
            )
        return request

    async def take_up(
        self, request: RequestState, mark: EventCursor | None, begin: Callable[[list[int]], AnySink]
    ) -> AnySink:
        """Wait until the request is as far again as `mark`, and add the reader that `begin` makes.

        `begin` gets the characters that the reader has of each choice, and brings it up to date.
        """
        watch = CatchUpWaiter(request, mark)
        self.recovery.join(request, watch)
        try:
            await watch.over
            sink = begin(await self.received(request, mark) if mark is not None else [])
        except BaseException:
            self.recovery.leave(request, watch)
            raise
        self.recovery.swap(request, watch, sink)
        return sink

    # ---------------------------------------------------------------- admission

    def refuse_new(self) -> None:
        """Raises when no request for text is taken now, whatever it asks."""
        if self.is_draining:
            raise _draining()
        if refusal := self.drains.refusal():
            raise refusal
        bound = self.config.server.max_concurrent_requests
        if self.in_flight >= bound:
            raise Overloaded(
                f"{bound} requests are in flight, the most that are taken (server.max_concurrent_requests); try again",
                retry_after_s=1.0,
            )

    async def admit(
        self, ask: GenerationRequest, caller: Caller, started_at: float, client_id: str = ""
    ) -> RequestState:
        """The request with its sequences, not yet opened. Raises `StarlingError`.

        The caller has counted it in `in_flight` before and counts it out at its end.
        """
        model = self.model_name(ask.model)
        if refusal := self.drains.refusal(model) or self._leaving(model):
            raise refusal
        self._admitting[model] += 1
        try:
            return await self._admit(model, ask, caller, started_at, client_id)
        finally:
            self._admitting[model] -= 1

    async def _admit(
        self, model: str, ask: GenerationRequest, caller: Caller, started_at: float, client_id: str
    ) -> RequestState:
        self.quotas.take_request(caller.tenant)
        timeout_s = self.config.server.request_timeout_ms / 1000
        left_s = started_at + timeout_s - self.clock()
        await self.wait_ready(model, min(READY_WAIT_S, left_s))
        try:
            async with asyncio.timeout(started_at + timeout_s - self.clock()):
                return await self._admit_to(model, ask, caller, started_at, client_id)
        except TimeoutError:
            raise StarlingError(
                "TIMEOUT",
                f"not begun after {timeout_s:.1f} s, the time a request may take "
                f"(server.request_timeout_ms); try again when it is less busy",
            ) from None

    async def _admit_to(
        self, model: str, ask: GenerationRequest, caller: Caller, started_at: float, client_id: str
    ) -> RequestState:
        """The model is ready."""
        with self.using(model) as instance:  # from here on it is this version's, whatever serves next
            salt = caller.salted(ask.cache_salt)
            if ask.session_id is None:
                ask = msgspec.structs.replace(ask, cache_salt=salt)
                return await self._put_together(instance, ask, (), caller, started_at, client_id)
            if ask.session_ttl_s is None:
                ask = msgspec.structs.replace(ask, session_ttl_s=self.config.cache.session_ttl_s)
            ask, held = await self.sessions.begin(model, caller.tenant, ask, salt, instance.id)
            try:
                return await self._put_together(instance, ask, held, caller, started_at, client_id)
            except BaseException:
                if ask.turn is not None:
                    self.sessions.abort(model, caller.tenant, ask.turn)
                raise

    async def _put_together(
        self,
        instance: ModelVersion,
        ask: GenerationRequest,
        held: tuple[int, ...],
        caller: Caller,
        started_at: float,
        client_id: str,
    ) -> RequestState:
        """`held`: the tokens before the prompt, of the session."""
        described = self.described[instance.id]
        check_number(max(1, len(ask.prompts)), ask.n, self.config, instance.settings)
        bounds = self.bounds(instance)
        prompts = await tokens_of(ask, instance, described, self.questions, bounds, len(held))
        check_ids(ask, prompts, described.vocab_size)
        if held:
            prompts = [held + prompt for prompt in prompts]
        budgets = [
            output_budget(len(prompt), ask.max_tokens, bounds, field_of(ask, index), ask.max_tokens_field)
            for index, prompt in enumerate(prompts)
        ]
        request = RequestState(
            f"req-{secrets.token_hex(12)}",
            ask,
            instance.name,
            caller.tenant,
            started_at + self.config.server.request_timeout_ms / 1000,
            priority=caller.priority,
            created=int(time.time()),
            fingerprint=f"fp_{described.digest[:12]}",
            started_at=started_at,
            client_id=client_id,
            instance=instance.id,
        )
        request.tokenizer = described.tokenizer
        if ask.echo:
            decode = partial(self.questions.decode, instance.id)
            request.echoes = [given if isinstance(given, str) else await decode(given) for given in ask.prompts]
        self.quotas.take_prompt(caller.tenant, sum(map(len, prompts)))
        request.seed = self._draw_seed() if ask.seed is None else ask.seed
        fields = {name: getattr(ask.sampling, name) for name in m.Sampling.__struct_fields__}
        sampling = m.Sampling(**{**fields, "seed": request.seed})
        stops = ask.stop_token_ids if sampling.ignore_eos else (*described.eos_ids, *ask.stop_token_ids)
        stop_ids = tuple(dict.fromkeys(stops))
        for place, (prompt, budget) in enumerate(zip(prompts, budgets)):
            data = array("i", prompt).tobytes()
            for choice in range(ask.n):
                request.sequences.append(
                    SequenceState(request, place * ask.n + choice, place, choice, data, budget, sampling, stop_ids)
                )
        return request

    def bounds(self, instance: ModelVersion) -> Bounds:
        """Of a version that is described."""
        limit = instance.settings.max_sequence_length
        context = self.described[instance.id].context_length
        scheduler = self.config.scheduler
        context = min(context, limit) if limit else context
        return Bounds(context, scheduler.max_prompt_tokens, scheduler.max_output_tokens)

    # ---------------------------------------------------------------- the end

    def _on_end(self, request: RequestState) -> None:
        if request.is_probe:
            return
        if not request.is_charged:
            self.quotas.charge_output(request.tenant, request.completion_tokens)
        self.metrics.ended(request)
        self.recovery.ended(request)
        self.sessions.ended(request)
        if request.response_key is not None and request.outcome is Outcome.FINISHED:
            self.responses.put(request.response_key, lines_of(request))

    def drain(self) -> None:
        """Take no more requests for text."""
        self.is_draining = True
        self.notice_change()

    def in_flight_of(self, model: str) -> int:
        """Requests for text from the model, being admitted or served."""
        return self._admitting[model] + sum(r.model == model for r in self.relay.requests.values())

    def in_use(self, instance_id: str) -> int:
        """Requests that began on that version, or will in a moment, and are to end on it."""
        under_way = sum(r.instance == instance_id for r in self.relay.requests.values())
        return self._using[instance_id] + under_way + self.recovery.waiting_on(instance_id)

    def end_all(self, error: StarlingError, model: str = "", instance: str = "") -> int:
        """End every request in flight (of a model, of a version) with an error; returns how many there were."""
        requests = [
            r
            for r in self.relay.requests.values()
            if (not model or r.model == model) and (not instance or r.instance == instance)
        ]
        for request in requests:
            self.relay.fail(request, error)
        return len(requests)


def _draining() -> StarlingError:
    message = "the server is being stopped and takes no more requests; try again"
    return StarlingError("DRAINING", message, retry_after_s=RETRY_AFTER_S)
