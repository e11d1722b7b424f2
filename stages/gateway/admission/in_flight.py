"""How many requests are being admitted or served: in all, of each principal and model, and on each loaded version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.api.fair_shares import FairShares, Refusal
from pipeline.api.keys import is_key
from pipeline.errors import Overloaded
from stages.gateway.requests.readers import has_reader
from stages.gateway.requests.relay import Relay


class InFlight:
    """One per gateway. `waiting_on(version)`: recovered requests that will continue on that version."""

    def __init__(self, relay: Relay, waiting_on: Callable[[str], int], bounds: FairShares) -> None:
        self.bounds = bounds  # of HTTP requests, from admission to the end of their response
        self._relay = relay
        self._waiting_on = waiting_on
        self._admitting: Counter[str] = Counter()  # by model: not in the relay yet
        self._using: Counter[str] = Counter()  # by version: being admitted to it, or using its tokenizer

    @property
    def count(self) -> int:
        """HTTP requests in flight, of all principals."""
        return self.bounds.held

    @property
    def would_be_lost(self) -> int:
        """HTTP requests, and requests without a client that no successor of this process would continue."""
        requests = self._relay.requests.values()
        return self.count + sum(not (has_reader(request) or request.is_journaled) for request in requests)

    @contextmanager
    def counted(self, principal: str) -> Iterator[None]:
        """Count one HTTP request of a tenant or address. Raises `Overloaded`."""
        refusal = self.bounds.refusal(principal)
        if refusal is not None:
            bound, what, key = self.bounds.total, "for all clients together", "max_concurrent_requests"
            if refusal is Refusal.SHARE:
                bound = self.bounds.share_of(principal)
                what, key = "for one client", "max_concurrent_per_tenant"
            source = f"server.{key}"
            if refusal is Refusal.SHARE and is_key(principal):
                what, source = "with this API key", "the key's own limit"
            message = f"{bound} requests can be in flight {what} ({source}), and no more are taken now; try again"
            raise Overloaded(message, retry_after_s=1.0)
        with self.bounds.taken(principal):
            yield

    @contextmanager
    def admitting(self, model: str) -> Iterator[None]:
        """Count a request for text from the model until the relay has it."""
        self._admitting[model] += 1
        try:
            yield
        finally:
            self._admitting[model] -= 1

    @contextmanager
    def using(self, version: str) -> Iterator[None]:
        """Keep a version loaded."""
        self._using[version] += 1
        try:
            yield
        finally:
            self._using[version] -= 1
            if not self._using[version]:
                del self._using[version]

    def of_model(self, model: str) -> int:
        """Requests for text from the model, being admitted or served."""
        return self._admitting[model] + sum(r.spec.model == model for r in self._relay.requests.values())

    def on_version(self, version: str) -> int:
        """Requests that must end on that version: it stays loaded until there are none."""
        served = sum(r.spec.version == version for r in self._relay.requests.values())
        return self._using[version] + served + self._waiting_on(version)
