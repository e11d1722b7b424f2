"""Handlers of /v1/embeddings, /v1/rerank and /v1/score.

The client waits for the whole response.  If this process dies meanwhile, the client sends its request again and gets
the same bytes; the death of every other stage is repaired here (requests/embedder.py).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from pipeline.api.json_body import to_json
from pipeline.api.requests.embeddings import EmbeddingRequest, input_names
from pipeline.api.requests.generation_request import TextOrIds
from pipeline.api.requests.rerank import RerankRequest, ScoreRequest
from pipeline.errors import InvalidRequest, StarlingError
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from shm.step_ring import MAX_POOLED_POSITIONS
from stages.gateway.admission.lengths import CONTEXT_EXCEEDED
from stages.gateway.admission.prompts import check_range
from stages.gateway.endpoints.embedding_response import response_parts, unit_vector, with_end
from stages.gateway.endpoints.rerank_response import cosine, rerank_response, score_response
from stages.gateway.http.context import CALLER, CLIENT_ID, PRINCIPAL, SERVICE, STARTED_AT, TIMELINE, TRACE
from stages.gateway.http.request_body import read_body
from stages.gateway.http.whole_response import held_response, send_body, send_parts
from stages.gateway.requests.embedder import EmbeddingCall
from stages.gateway.service import Service

ENCODED_AT_ONCE = 64  # inputs of a request at the tokenizer
DEFAULT_POOLING = "last"  # of models that generate text, whose last position has seen all others


async def embeddings(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        body: EmbeddingRequest = await read_body(request, service.config, "embeddings")
        model = _model(service, body.model)
        with _timeline(request, model, "embeddings"):
            names = input_names(body.inputs)
            vectors, n_tokens = await _pool(request, model, body.inputs, names, body.keep_alive, body.dimensions)
            with held_response(request) as held:
                parts = []
                for part in response_parts(model, vectors, n_tokens, body):
                    held.add(len(part))
                    parts.append(part)
                    await asyncio.sleep(0)  # let other requests run
                return await send_parts(request, parts)


async def rerank(request: web.Request) -> web.StreamResponse:
    """POST /v1/rerank."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        body: RerankRequest = await read_body(request, service.config, "rerank")
        model = _model(service, body.model)
        with _timeline(request, model, "rerank"):
            vectors, n_tokens = await _pool(request, model, body.texts, body.names, body.keep_alive)
            scores = await _cosines(vectors, [(0, 1 + index) for index in range(len(body.documents))])
            return await send_body(request, to_json(rerank_response(model, scores, n_tokens, body)))


async def score(request: web.Request) -> web.StreamResponse:
    """POST /v1/score."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        body: ScoreRequest = await read_body(request, service.config, "score")
        model = _model(service, body.model)
        with _timeline(request, model, "score"):
            vectors, n_tokens = await _pool(request, model, body.texts, body.names, body.keep_alive)
            scores = await _cosines(vectors, body.pairs)
            return await send_body(request, to_json(score_response(model, scores, n_tokens)))


def _model(service: Service, name: str) -> str:
    """The model of that name. Raises `ModelNotFound`, `InvalidRequest`."""
    model, adapter = service.catalog.resolve_adapter(name)
    if adapter:
        raise InvalidRequest(f"embeddings are computed without adapters: ask for {model!r}", "model")
    return model


@contextmanager
def _timeline(request: web.Request, model: str, endpoint: str) -> Iterator[None]:
    """What happens to the request, for `starling trace`, spans and the log of slow requests."""
    caller = request[CALLER]
    with request.app[SERVICE].timelines.embedding(
        request[STARTED_AT],
        endpoint,
        tenant=caller.tenant,
        model=model,
        client_id=request[CLIENT_ID],
        context=request.get(TRACE),
    ) as trace:
        if trace is not None:
            request[TIMELINE] = trace
        yield


async def _cosines(vectors: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> list[float]:
    units = []
    for vector in vectors:
        units.append(unit_vector(vector))
        await asyncio.sleep(0)  # let other requests run
    scores = []
    for first, second in pairs:
        scores.append(cosine(units[first], units[second]))
        await asyncio.sleep(0)
    return scores


async def _pool(
    request: web.Request,
    model: str,
    inputs: Sequence[TextOrIds],
    names: Sequence[str],
    keep_alive: float | None,
    dimensions: int | None = None,
) -> tuple[list[bytes], int]:
    """Return the pooled hidden states (f32 bytes) of each input, and the number of their tokens. Charges the tenant.

    `names`: of the inputs, for error messages. `keep_alive`: how long the model stays loaded (s).
    Raises `StarlingError`.
    """
    service, caller = request.app[SERVICE], request[CALLER]
    deadline = request[STARTED_AT] + service.config.server.request_timeout_ms / 1000
    readiness = service.readiness
    if refusal := readiness.drains.rejection(model) or readiness.unloading(model):
        raise refusal
    with service.in_flight.admitting(model):
        left_s = deadline - service.clock()
        await service.admission.ensure_loaded(model, caller, left_s, keep_alive=keep_alive)
        with service.admission.serving_version(model) as version, service.on_demand.using(model, caller, keep_alive):
            described = service.loaded.described[version.id]
            pooling = pooling_of(version, described)
            if dimensions is not None and dimensions > described.width:
                raise InvalidRequest(
                    f"dimensions is {dimensions}; the embeddings of model {model!r} have {described.width}: ask for at "
                    f"most as many",
                    "dimensions",
                )
            try:
                async with asyncio.timeout(deadline - service.clock()):
                    prompts = await _tokenize(service, version, described, inputs, names, request[CLIENT_ID])
            except TimeoutError:
                raise StarlingError(
                    "TIMEOUT",
                    "the texts were not tokenized in the time that a request may take (server.request_timeout_ms); "
                    "send less, or try again when it is less busy",
                ) from None
            n_tokens = sum(len(prompt) // 4 for prompt in prompts)
            service.admission.charge_tokens(caller, n_tokens)
            call = EmbeddingCall(model, version.id, caller.tenant, caller.priority, pooling, deadline)
            trace, timelines = request.get(TIMELINE), service.timelines
            timelines.submitted(trace, version.id, len(prompts))
            vectors = await service.embedder.pool(call, prompts, trace.id if trace is not None else "")
            timelines.embedded(trace, n_tokens)
            return vectors, n_tokens


def pooling_of(version: ModelVersion, described: m.Described) -> str:
    """Return how the version pools hidden states. Raises `InvalidRequest` if its embeddings are switched off."""
    pooling = version.settings.pooling or described.pooling or DEFAULT_POOLING
    if pooling == "none":
        raise InvalidRequest(
            f"model {version.name!r} has no embeddings (its pooling is none in the configuration); use another model",
            "model",
        )
    return pooling


async def _tokenize(
    service: Service,
    version: ModelVersion,
    described: m.Described,
    inputs: Sequence[TextOrIds],
    names: Sequence[str],
    client_id: str,
) -> list[bytes]:
    """The token ids of each input, i32 little-endian. A text begins and ends with the tokens that the model wants."""
    bounds = service.loaded.bounds(version)
    longest = min(bounds.context, bounds.max_prompt_tokens or bounds.context, MAX_POOLED_POSITIONS)
    bound = "the model's context, or scheduler.max_prompt_tokens"
    if not described.generates:
        scheduler = service.config.scheduler
        in_one_step = max(scheduler.max_step_tokens, service.config.max_batch_size(version.settings))
        if in_one_step < longest:
            longest, bound = in_one_step, "which the model computes in one step: scheduler.max_step_tokens"

    def checked(tokens: Sequence[int], n: int, index: int, is_exact: bool = True) -> bytes:
        name, field = names[index], names[index].partition("[")[0]
        if n > longest:
            count = n if is_exact else f"at least {n}"
            raise InvalidRequest(
                f"{name} has {count} tokens; at most {longest} are allowed ({bound}): shorten it",
                field,
                code=CONTEXT_EXCEEDED,
            )
        if not tokens:
            raise InvalidRequest(f"{name} has no tokens; send some text", field)
        check_range(tokens, name + "[{}]", field, described.vocab_size)
        return array("i", tokens).tobytes()

    async def encoded(text: str, index: int) -> bytes:
        reply = await service.tokenizer.encode(version.id, text, token_limit=longest, request_id=client_id)
        if reply.too_many:
            return checked((), reply.too_many, index, reply.is_exact)
        tokens = with_end(reply.tokens, described.end_id)
        return checked(tokens, len(tokens), index)

    prompts: list[bytes] = []
    for begin in range(0, len(inputs), ENCODED_AT_ONCE):
        some = inputs[begin : begin + ENCODED_AT_ONCE]
        texts = [encoded(one, begin + i) for i, one in enumerate(some) if isinstance(one, str)]
        replies = iter(await asyncio.gather(*texts))
        prompts += [
            next(replies) if isinstance(one, str) else checked(one, len(one), begin + i) for i, one in enumerate(some)
        ]
    return prompts
