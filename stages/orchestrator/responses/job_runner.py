"""Runs a request for a response in the background, as the relay forwards one of a client. Without sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from pipeline.api import response_context
from pipeline.api.quotas import Quotas
from pipeline.errors import ModelUnavailable
from stages.orchestrator.forward import Forward, Refusal
from stages.orchestrator.interfaces import RoutedRequest
from stages.orchestrator.relay import Relay
from stages.orchestrator.responses.background import Begun, KeepJob
from stages.orchestrator.responses.jobs import Job
from stages.orchestrator.responses.keeping import KeepingOut, without_record
from stages.orchestrator.responses.service import PATH
from stages.orchestrator.traffic import Traffic
from stages.orchestrator.upstream import Unreachable

Locate = Callable[[Job], Awaitable[str]]  # the agent whose engine has the request; "": none, as far as is known


def forward_of(job: Job, agent_id: str = "") -> Forward:
    """The request as it is sent to engines, which may have it already. `agent_id`: the agent that has it; "": any."""
    routed = RoutedRequest(
        request_id=job.request_id,
        model=job.model,
        prompt_bytes=job.prompt_bytes,
        blocks=job.blocks,
        pinned=agent_id,
        has_context=True,
    )
    return Forward(
        routed=routed,
        path=PATH,
        body=job.body,
        headers=job.headers,
        is_stream=job.is_stream,
        was_sent=True,
        in_background=True,
    )


class JobRunner:
    """One per orchestrator."""

    def __init__(self, relay: Relay, quotas: Quotas, locate: Locate, traffic: Traffic) -> None:
        self._relay = relay
        self._locate = locate
        self._quotas = quotas
        self._traffic = traffic

    async def run(self, job: Job, out: Begun, keep: KeepJob) -> bytes:
        """Run a request to its end; JSON of the response if it has failed, else b"". Raises `StarlingError`."""
        forward = forward_of(job, "" if out.is_new else await self._locate(job))
        try:
            if not job.is_stream:
                await self._whole(job, forward, keep)
                return b""
            keeping = KeepingOut(out, partial(keep, job))
            await self._relay.stream(forward, keeping)
        except Refusal as refusal:
            raise refusal.to_error() from None
        except Unreachable as error:
            raise ModelUnavailable(str(error)) from None
        if keeping.error is not None:
            raise keeping.error
        self._charge(job, keeping.usage)
        return keeping.failed

    async def _whole(self, job: Job, forward: Forward, keep: KeepJob) -> None:
        _, headers, body = await self._relay.whole(forward)
        body, kept = response_context.split_kept(body, headers.get(response_context.KEPT_HEADER))
        if kept is None:
            raise without_record()
        await keep(job, body, kept)
        self._charge(job, msgspec.json.decode(body, type=dict[str, Any]).get("usage") or {})

    def _charge(self, job: Job, usage: dict[str, Any]) -> None:
        tokens = usage.get("output_tokens", 0)
        self._quotas.charge_output(job.tenant, tokens, job.key_id)
        self._traffic.text(job.tenant, job.model, job.prompt_bytes, tokens)
