"""Handlers of /v1/embeddings, /v1/rerank and /v1/score.

The client waits for the whole response.  If this process dies meanwhile, the client sends its request again and gets
the same bytes; the death of every other stage is repaired here (requests/embedder.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from aiohttp import web

from pipeline.api.json_body import to_json
from pipeline.api.requests.embeddings import EmbeddingRequest, input_names
from pipeline.api.requests.generation_request import TextOrIds
from pipeline.api.requests.rerank import RerankRequest, ScoreRequest
from pipeline.errors import InvalidRequest, StarlingError
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.admission.pooled_prompts import PooledPrompts
from stages.gateway.endpoints.embedding_response import response_parts, unit_vector
from stages.gateway.endpoints.rerank_response import cosine, rerank_response, score_response
from stages.gateway.http.context import (
    CALLER,
    CLIENT_ID,
    PRINCIPAL,
    SERVICE,
    STARTED_AT,
    TIMELINE,
    TRACE,
    log_id,
    text_owner,
)
from stages.gateway.http.request_body import read_body
from stages.gateway.http.whole_response import held_response, send_body, send_parts
from stages.gateway.requests.embedder import EmbeddingCall
from stages.gateway.service import Service
from stages.gateway.tokenizer_client import TextOwner

RANK = "rank"  # the pooling of models that score pairs
DEFAULT_POOLING = "last"  # of models that generate text, whose last position has seen all others


class _Found(NamedTuple):
    """What was computed of the inputs of a request, or of its pairs."""

    vectors: list[bytes]  # f32: pooled hidden states; of a model that scores pairs the score first
    n_tokens: int
    are_scores: bool


async def embeddings(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        body: EmbeddingRequest = await read_body(request, service.config, "embeddings")
        model = _model(service, body.model)
        with _timeline(request, model, "embeddings"):
            names = input_names(body.inputs)
            found = await _pool(request, model, body.inputs, names, body.keep_alive, dimensions=body.dimensions)
            with held_response(request) as held:
                parts = []
                for part in response_parts(model, found.vectors, found.n_tokens, body):
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
            scores, n_tokens = await _scores(request, model, body)
            return await send_body(request, to_json(rerank_response(model, scores, n_tokens, body)))


async def score(request: web.Request) -> web.StreamResponse:
    """POST /v1/score."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        body: ScoreRequest = await read_body(request, service.config, "score")
        model = _model(service, body.model)
        with _timeline(request, model, "score"):
            scores, n_tokens = await _scores(request, model, body)
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


async def _scores(request: web.Request, model: str, body: RerankRequest | ScoreRequest) -> tuple[list[float], int]:
    """Return the score of each pair, and the number of their tokens: the model's own scores, or cosines."""
    found = await _pool(request, model, body.texts, body.names, body.keep_alive, body.pairs)
    if found.are_scores:
        return [float(np.frombuffer(vector, "<f4")[0]) for vector in found.vectors], found.n_tokens
    return await _cosines(found.vectors, body.pairs), found.n_tokens


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
    pairs: Sequence[tuple[int, int]] = (),
    dimensions: int | None = None,
) -> _Found:
    """Compute the vector of each input or, where the model scores pairs, of each of `pairs`. Charges the tenant.

    `names`: of the inputs, for error messages. `pairs`: indices of inputs. `keep_alive`: how long the model stays
    loaded (s). Raises `StarlingError`.
    """
    service, caller = request.app[SERVICE], request[CALLER]
    deadline = request[STARTED_AT] + service.config.server.request_timeout_ms / 1000
    readiness = service.readiness
    if refusal := readiness.drains.rejection(model) or readiness.unloading(model):
        raise refusal
    with service.in_flight.admitting(model):
        left_s = deadline - service.clock()
        await service.admission.ensure_loaded(model, caller, request[PRINCIPAL], left_s, keep_alive=keep_alive)
        with service.admission.serving_version(model) as version, service.on_demand.using(model, caller, keep_alive):
            described = service.loaded.described[version.id]
            pooling = pooling_of(version, described)
            is_scored = pooling == RANK
            if is_scored and not pairs:
                raise InvalidRequest(
                    f"model {model!r} scores pairs of texts and has no embeddings: use /v1/rerank or /v1/score, or "
                    f"another model",
                    "model",
                )
            if dimensions is not None and dimensions > described.width:
                raise InvalidRequest(
                    f"dimensions is {dimensions}; the embeddings of model {model!r} have {described.width}: ask for at "
                    f"most as many",
                    "dimensions",
                )
            try:
                async with asyncio.timeout(deadline - service.clock()):
                    encoder = _encoder(service, version, described, text_owner(request))
                    if is_scored:
                        texts = [text for text in inputs if isinstance(text, str)]  # all: token ids have no pairs
                        prompts = await encoder.pairs(texts, names, pairs)
                    else:
                        prompts = await encoder.alone(inputs, names)
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
            vectors = await service.embedder.pool(call, prompts, log_id(request))
            timelines.embedded(trace, n_tokens)
            return _Found(vectors, n_tokens, is_scored)


def _encoder(service: Service, version: ModelVersion, described: m.Described, owner: TextOwner) -> PooledPrompts:
    in_one_step = max(service.config.scheduler.max_step_tokens, service.config.max_batch_size(version.settings))
    bounds = service.loaded.bounds(version)
    return PooledPrompts(service.tokenizer, version.id, described, bounds, in_one_step, owner)


def pooling_of(version: ModelVersion, described: m.Described) -> str:
    """Return how the version pools hidden states. Raises `InvalidRequest` if its embeddings are switched off."""
    pooling = version.settings.pooling or described.pooling or DEFAULT_POOLING
    if pooling == "none":
        raise InvalidRequest(
            f"model {version.name!r} has no embeddings (its pooling is none in the configuration); use another model",
            "model",
        )
    if described.pooling == RANK and pooling != RANK:
        raise InvalidRequest(
            f"model {version.name!r} scores pairs of texts; its pooling is {pooling!r} in the configuration, where it "
            f'must be "" (models[].pooling)',
            "model",
        )
    return pooling
