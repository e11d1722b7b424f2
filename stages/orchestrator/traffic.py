"""What an orchestrator counts of its clients' requests, in the metrics of a server that mean the same.

Tokens are those that quotas count: of an answer the ones that the client has got, once, of a stream its events; of a
prompt one for each `CHARGED_BYTES`, because its tokens are not known here.  A request without an answer counts none.
Without sockets.
"""

from __future__ import annotations

from pipeline.errors import StarlingError
from pipeline.observe.metrics import Metrics
from stages.orchestrator.read_body import CHARGED_BYTES


class Traffic:
    """One per orchestrator. `Metrics` bounds the number of tenants and models."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def answered(self, endpoint: str, status: int, took_s: float, error: StarlingError | None, tenant: str) -> None:
        """Count an answer. `tenant`: "" if it is not known, or an operator's."""
        self._metrics.add("starling_requests_total", endpoint, str(status))
        self._metrics.observe("starling_request_duration_seconds", took_s, endpoint)
        if error is not None and error.code:
            self._metrics.add("starling_rejections_total", error.code)
        if tenant:
            self._metrics.add("starling_tenant_requests_total", tenant)

    def text(self, tenant: str, model: str, prompt_bytes: int, output_tokens: int) -> None:
        """Count output that a client has got, if there is any, with the prompt (0: it was counted before)."""
        if output_tokens > 0:
            kinds = (("prompt", -(-prompt_bytes // CHARGED_BYTES)), ("output", output_tokens))
            for kind, tokens in kinds:
                self._metrics.add("starling_tenant_request_tokens_total", tenant, kind, amount=tokens)
            self._metrics.add("starling_tokens_generated_total", model, amount=output_tokens)

    def first_event(self, model: str, seconds: float) -> None:
        """A stream has begun so long after its request was read."""
        self._metrics.observe("starling_time_to_first_token_seconds", seconds, model)
