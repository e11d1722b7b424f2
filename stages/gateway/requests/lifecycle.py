"""Start and end of an admitted request: where session, response cache, journal, relay, quotas and metrics meet.

start   bind the session's turn, journal the request, look in the response cache, submit it (or serve the answer)
end     charge the output, count, journal the outcome, release the turn, store the answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from pipeline.api.quotas import Quotas
from pipeline.errors import StarlingError
from pipeline.faults import points
from stages.gateway.metrics import GatewayMetrics
from stages.gateway.requests.embedder import Embedder
from stages.gateway.requests.output import SequenceOutput, output_of
from stages.gateway.requests.readers import Readers, outlives_gateway
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.response_cache import BYPASS, HIT, MISS, ResponseCache, is_determined, key_of
from stages.gateway.requests.sessions import Sessions
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.tracing.recorder import Recorder
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
        clock: Callable[[], float],
        embedder: Embedder,
        timelines: Recorder,
    ) -> None:
        """`clock` is monotonic. Set `on_used` to learn of the models that ended requests have used."""
        self._timelines = timelines
        self.on_used: Callable[[str, str, float | None], None] = lambda model, tenant, keep_alive: None
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
        self._clock = clock
        self._embedder = embedder

    async def start(self, request: RequestState) -> None:
        """Start an admitted request that has its sink. Raises a TIMEOUT if the disk does not take its record in time.

        The caller keeps the request's version loaded meanwhile.
        """
        self._admitted.count("", request.id)
        self._sessions.bind(request)
        if self._recovery.journal.has_journal:
            await self._write_record(request)
            if request.trace is not None:
                request.trace.add(self._clock(), "journaled")
        self._recovery.keys.run(request.spec)  # from here on another attempt finds the request
        self._journaled.count("", request.id)
        outputs = self._cached_answer(request)
        if outputs is None:
            self._relay.open(request)
        else:
            if request.trace is not None:
                request.trace.add(self._clock(), "answered from the cache")
            self._relay.open_answered(request, outputs)

    async def _write_record(self, request: RequestState) -> None:
        loop = asyncio.get_running_loop()
        written: asyncio.Future[bool] = loop.create_future()

        def on_written(is_written: bool) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_resolve, written, is_written)

        self._recovery.record_start(request.spec, on_written)
        try:
            async with asyncio.timeout(request.deadline - self._clock()):
                request.is_journaled = await written
        except BaseException as error:
            self._withdraw(request)
            if isinstance(error, TimeoutError):
                raise StarlingError(
                    "TIMEOUT",
                    "the disk did not take the request's journal record in the time that a request may take "
                    "(server.request_timeout_ms); check the disk of server.state_dir",
                ) from None
            raise

    def _withdraw(self, request: RequestState) -> None:
        """The client has left, or the time is over, before the request was submitted."""
        spec = request.spec
        self._timelines.withdraw(request.trace)
        self._recovery.record_withdrawal(spec)
        if spec.generation.turn is not None:
            self._sessions.abort(spec.model, spec.tenant, spec.generation.turn)

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
            self._quotas.charge_output(request.spec.tenant, request.completion_tokens, request.spec.api_key_id)
        self._metrics.ended(request)
        self._timelines.ended(request)
        self.on_used(request.spec.model, request.spec.tenant, request.spec.generation.kept_alive_s)
        self._readers.forget(request.id)
        self._recovery.record_end(request)
        self._sessions.ended(request)
        if request.response_key is not None and request.outcome is Outcome.FINISHED:
            outputs = [output_of(sequence) for sequence in request.sequences]
            self._response_cache.put(request.response_key, outputs, request.spec.tenant)

    def end_all(self, error: StarlingError, model: str = "", version: str = "", *, is_exit: bool = False) -> int:
        """Fail all requests in flight, or those of a model or of a version. Returns their number.

        `is_exit`: this process ends; requests that its successor continues are left as they are.
        """
        requests = [
            request
            for request in self._relay.requests.values()
            if model in ("", request.spec.model)
            and version in ("", request.spec.version)
            and not (is_exit and outlives_gateway(request))
        ]
        for request in requests:
            self._relay.fail(request, error)
        return len(requests) + self._embedder.end_all(error, model, version)

    def leave_to_successor(self) -> int:
        """At the exit: drop the requests that `end_all` has left, without an end. Returns their number.

        Their journal records have no end either, so the successor continues them; so do their sequences at the
        scheduler. One whose output is complete stays: it ends as soon as that is stored.
        """
        relay = self._relay
        left = [request for request in relay.requests.values() if request.n_open and outlives_gateway(request)]
        for request in left:
            relay.drop(request)
        return len(left)


def _resolve(written: asyncio.Future[bool], is_written: bool) -> None:
    if not written.done():  # the caller may have stopped waiting
        written.set_result(is_written)
