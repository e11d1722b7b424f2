"""Handlers of /v1/tokenize, /v1/detokenize and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio

from aiohttp import web

from pipeline.api.generation_fields import MAX_PROMPT_IDS
from pipeline.api.json_body import to_json
from pipeline.api.requests.messages import text_characters
from stages.gateway.admission.lengths import Bounds
from stages.gateway.admission.prompts import check_range, tokenize_prompts
from stages.gateway.endpoints.tokenize_response import tokenize_response
from stages.gateway.http.context import CALLER, PRINCIPAL, SERVICE, STARTED_AT, text_owner
from stages.gateway.http.request_body import read_body
from stages.gateway.http.whole_response import held_response, send_body, send_parts

CHARGED_BYTES = 4  # of text to tokenize that the quota counts as a token: the count is known before the work


def _left_s(request: web.Request) -> float:
    """Seconds that the request has left."""
    service = request.app[SERVICE]
    return request[STARTED_AT] + service.config.server.request_timeout_ms / 1000 - service.clock()


async def tokenize(request: web.Request) -> web.StreamResponse:
    """POST /v1/tokenize: the token ids of a text."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        body = await read_body(request, service.config, "tokenize")
        model = service.catalog.resolve_adapter(body.model)[0]
        service.admission.charge_tokens(request[CALLER], -(-len(body.text.encode()) // CHARGED_BYTES))
        await service.admission.ensure_loaded(model, request[CALLER], request[PRINCIPAL], _left_s(request))
        with service.admission.serving_version(model) as version:
            encoded = await service.tokenizer.encode(
                version.id,
                body.text,
                add_bos=body.add_bos,
                parse_special=body.parse_special,
                offsets=True,
                token_limit=MAX_PROMPT_IDS,
                owner=text_owner(request),
                field="text",
            )
        parts = []
        with held_response(request) as held:
            for part in tokenize_response(model, encoded):
                held.add(len(part))
                parts.append(part)
                await asyncio.sleep(0)  # let other requests run
            del encoded
            return await send_parts(request, parts)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens: the number of tokens of a prompt."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        generation = await read_body(request, service.config, "count_tokens")
        model = service.catalog.resolve_adapter(generation.model)[0]
        service.admission.charge_tokens(request[CALLER], -(-text_characters(generation) // CHARGED_BYTES))
        await service.admission.ensure_loaded(model, request[CALLER], request[PRINCIPAL], _left_s(request))
        with service.admission.serving_version(model) as version:
            described = await service.readiness.describe(version)
            bounds = Bounds(MAX_PROMPT_IDS + 1, 0, 0)
            owner = text_owner(request)
            (prompt,) = await tokenize_prompts(generation, version, described, service.tokenizer, bounds, 0, owner)
        return await send_body(request, to_json({"input_tokens": len(prompt)}))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """POST /v1/detokenize: the text of token ids."""
    service = request.app[SERVICE]
    with service.admission.slot(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        body = await read_body(request, service.config, "detokenize")
        model = service.catalog.resolve_adapter(body.model)[0]
        service.admission.charge_tokens(request[CALLER], len(body.tokens))
        await service.admission.ensure_loaded(model, request[CALLER], request[PRINCIPAL], _left_s(request))
        with service.admission.serving_version(model) as version:
            described = await service.readiness.describe(version)
            check_range(body.tokens, "tokens[{}]", "tokens", described.vocab_size)
            skip_special, owner = body.skip_special, text_owner(request)
            text = await service.tokenizer.decode(version.id, body.tokens, skip_special=skip_special, owner=owner)
        return await send_body(request, to_json({"model": model, "text": text}))
