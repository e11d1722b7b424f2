"""Start and end of an admitted request: where session, response cache, journal, relay, quotas and metrics meet.

start   bind the session's turn, look in the response cache, journal the request, submit it (or serve the answer)
end     charge the output, count, journal the outcome, release the turn, store the answer
"""

from __future__ import annotations

from pipeline.api.quotas import Quotas
from pipeline.errors import StarlingError
from pipeline.faults import points
from stages.gateway.metrics import GatewayMetrics
from stages.gateway.requests.output import SequenceOutput, output_of
from stages.gateway.requests.readers import Readers
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.response_cache import BYPASS, HIT, MISS, ResponseCache, is_determined, key_of
from stages.gateway.requests.sessions import Sessions
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.versions.catalog import VersionCatalog


class RequestLifecycle:
    """One per gateway."""

    def __init__(
        self,
        relay: Relay,
        sessions: Sessions,
        recovery: Recovery,
        readers: Readers,
        response_cache: ResponseCache,
        catalog: VersionCatalog,
        quotas: Quotas,
        metrics: GatewayMetrics,
    ) -> None:
        self._admitted = points.fault_point("gateway", "admitted")
        self._journaled = points.fault_point("gateway", "journaled")
        self._finishing = points.fault_point("gateway", "finishing")
        self._relay = relay
        self._sessions = sessions
        self._recovery = recovery
        self._readers = readers
        self._response_cache = response_cache
        self._catalog = catalog
        self._quotas = quotas
        self._metrics = metrics

    def start(self, request: RequestState) -> None:
        """Start an admitted request that has its sink."""
        self._admitted.count("", request.id)
        self._sessions.bind(request)
        outputs = self._cached_answer(request)
        self._recovery.record_start(request.spec)
        self._journaled.count("", request.id)
        if outputs is None:
            self._relay.open(request)
        else:
            self._relay.open_answered(request, outputs)

    def _cached_answer(self, request: RequestState) -> list[SequenceOutput] | None:
        """From the response cache; None: it must be computed."""
        if not self._response_cache.is_enabled:
            return None
        version = self._catalog.get(request.spec.version)
        if version is None or not is_determined(request.spec):
            request.response_cache = BYPASS
            return None
        key = key_of(request.spec, version.settings.kv_type)
        outputs = self._response_cache.get(key)
        request.response_cache = MISS if outputs is None else HIT
        if outputs is None:
            request.response_key = key
        self._metrics.looked_up(request)
        return outputs

    def on_end(self, request: RequestState) -> None:
        """Called by the relay when a request has its outcome."""
        if request.is_probe:
            return
        if request.outcome is Outcome.FINISHED:
            self._finishing.count("", request.id)
        if not request.is_charged:
            self._quotas.charge_output(request.spec.tenant, request.completion_tokens)
        self._metrics.ended(request)
        self._readers.forget(request.id)
        self._recovery.record_end(request)
        self._sessions.ended(request)
        if request.response_key is not None and request.outcome is Outcome.FINISHED:
            self._response_cache.put(request.response_key, [output_of(sequence) for sequence in request.sequences])

    def end_all(self, error: StarlingError, model: str = "", version: str = "") -> int:
        """Fail all requests in flight, or those of a model or of a version. Returns their number."""
        requests = [
            request
            for request in self._relay.requests.values()
            if model in ("", request.spec.model) and version in ("", request.spec.version)
        ]
        for request in requests:
            self._relay.fail(request, error)
        return len(requests)
