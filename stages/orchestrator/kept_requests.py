"""Requests that clients may read again, and may continue: what an orchestrator keeps of those that it has forwarded.

Beyond the bounds, the tenant that holds most loses its oldest one: no tenant can drive out those of the others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from pipeline.api.idempotency_key import other_body
from pipeline.api.output_tokens import RELAY, read_relay
from pipeline.errors import NotFound
from pipeline.fleet.bodies import LoadedModel
from stages.orchestrator.forward import Forward
from stages.orchestrator.output_record import OutputRecord

KEPT_S = 120.0  # how long a request can be sent again after its client has left
KEPT_BYTES = 32 << 20  # of their bodies and tokens
KEPT_COUNT = 4096


class _Kept(msgspec.Struct, gc=False):
    forward: Forward
    agent_id: str
    tenant: str
    nbytes: int  # as it is counted
    under_way: list[Forward]  # it, or its repetitions, whose clients are connected
    until: float = float("inf")  # s of the clock, when none is
    record: OutputRecord | None = None  # what its client may continue from
    charged: int = 0  # tokens of its answer

    def is_other(self, digest: bytes) -> bool:
        """Whether a request with the same key and this digest has another body."""
        return bool(digest and self.forward.digest and digest != self.forward.digest)


class KeptRequests:
    """Requests that this orchestrator has forwarded, so that their clients can read them again. Bounded.

    A request whose key was sent with another body before leaves the entry of the first one as it is: the engine refuses
    it, unless the first one was refused, has failed or was cancelled. It is pending until an engine begins to answer,
    and is found in place of the first one if that one has no client; if it is refused, only it is forgotten.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._pending: dict[str, _Kept] = {}  # with another body than the kept one of their id
        self._names: dict[str, OrderedDict[str, None]] = {}  # of both by tenant, oldest first
        self._bytes_of: Counter[str] = Counter()  # by tenant
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept) + len(self._pending)

    def check_key(self, request_id: str, key: str, digest: bytes) -> None:
        """Raises `Conflict` if the request of a key is under way here with another body than that of `digest`."""
        known = self._current(request_id)
        if known is not None and known.under_way and known.is_other(digest):
            raise other_body(key)

    def put(self, forward: Forward, agent_id: str, engine: LoadedModel) -> None:
        """It is sent to an agent's engine. Raises `NotFound` for one to be read again that the engine cannot repeat."""
        known = self._kept.get(forward.id)
        pending = self._pending.get(forward.id)
        if known.is_other(forward.digest) if known is not None else pending is not None:
            self._put_pending(forward, agent_id, engine)
            return
        if engine.continues_text:
            if known is not None:
                self._drop(forward.id)
            if forward.was_sent:  # its client would get another answer, which is not charged
                raise NotFound(
                    f"the answer of request {forward.id} is not stored: {engine.engine} computes the model, and gives "
                    "no answer twice; send the request again"
                )
            return
        if known is None:
            self._add(self._kept, forward, agent_id)
            return
        known.agent_id, known.until = agent_id, float("inf")
        if all(one is not forward for one in known.under_way):
            known.under_way.append(forward)

    def _put_pending(self, forward: Forward, agent_id: str, engine: LoadedModel) -> None:
        """It has another body than the kept request of its id, which may have failed."""
        pending = self._pending.get(forward.id)
        if engine.continues_text:  # its answer could not be repeated
            return
        if pending is None:
            self._add(self._pending, forward, agent_id)
        elif not pending.is_other(forward.digest):
            pending.agent_id = agent_id
            if all(one is not forward for one in pending.under_way):
                pending.under_way.append(forward)

    def accepted(self, forward: Forward, agent_id: str, engine: LoadedModel) -> None:
        """An engine has begun to answer it: an earlier request with its key, but another body, cannot be read again."""
        known, pending = self._kept.get(forward.id), self._pending.get(forward.id)
        if known is not None and not known.is_other(forward.digest):
            return
        if known is not None:
            self._drop(forward.id)
        if pending is not None and not engine.continues_text and not pending.is_other(forward.digest):
            del self._pending[forward.id]
            pending.agent_id = agent_id
            self._kept[forward.id] = pending
            return
        if pending is not None:
            self._drop_pending(forward.id)
        if (known is not None or pending is not None) and not engine.continues_text:
            self._add(self._kept, forward, agent_id)

    def left(self, forward: Forward, record: OutputRecord | None = None) -> None:
        """Its client has left, or has everything. `record`: of the output so far."""
        pending = self._pending.get(forward.id)
        if pending is not None:
            pending.under_way = [one for one in pending.under_way if one is not forward]
            if not pending.under_way:  # no engine has begun to answer it
                self._drop_pending(forward.id)
        known = self._kept.get(forward.id)
        others = [one for one in known.under_way if one is not forward] if known is not None else []
        if known is None or len(others) == len(known.under_way):
            return
        known.under_way = others
        if not others:
            known.until = self._clock() + KEPT_S
        if record is not None:
            nbytes = len(known.forward.body) + record.nbytes
            self._count(known.tenant, nbytes - known.nbytes)
            known.nbytes, known.record = nbytes, record
            self._trim()

    def record(self, forward: Forward) -> OutputRecord:
        """What a client that continues its stream has left; else a new one."""
        known = self._kept.get(forward.id) if forward.last_id else None
        if known is None or known.record is None or known.is_other(forward.digest):
            return OutputRecord()
        return known.record

    def uncharged(self, forward: Forward, tokens: int, *, is_all: bool, had: int = 0) -> int:
        """How many of the tokens that a client has got are to be charged; from then on they are.

        `is_all`: they are all of the answer up to there, of which an earlier reader may have been charged a part; else
        `had` tokens were before them.
        """
        known = self._kept.get(forward.id)
        if known is None or known.is_other(forward.digest):
            return tokens
        end = tokens if is_all else had + tokens
        fresh = max(0, min(tokens, end - known.charged))
        known.charged += fresh
        return fresh

    def find(self, request_id: str) -> tuple[Forward, str] | None:
        """The request, and the agent that it was sent to last."""
        known = self._current(request_id)
        return (known.forward, known.agent_id) if known is not None else None

    def forget(self, request_id: str) -> None:
        """It is not to be read again."""
        if request_id in self._kept:
            self._drop(request_id)
        if request_id in self._pending:
            self._drop_pending(request_id)

    def expire(self) -> None:
        """Forget what is older than `KEPT_S`."""
        now = self._clock()
        for name in [name for name, kept in self._kept.items() if kept.until <= now]:
            self._drop(name)

    def _current(self, request_id: str) -> _Kept | None:
        known, pending = self._kept.get(request_id), self._pending.get(request_id)
        return known if pending is None or (known is not None and known.under_way) else pending

    def _add(self, entries: dict[str, _Kept], forward: Forward, agent_id: str) -> None:
        relay = forward.headers.get(RELAY)
        tenant = read_relay(relay).tenant if relay is not None else ""
        entries[forward.id] = _Kept(forward, agent_id, tenant, len(forward.body), [forward])
        self._names.setdefault(tenant, OrderedDict())[forward.id] = None
        self._count(tenant, len(forward.body))
        self._trim()

    def _count(self, tenant: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bytes_of[tenant] += nbytes

    def _trim(self) -> None:
        while self._names and ((is_large := self.nbytes > KEPT_BYTES) or len(self) > KEPT_COUNT):
            held = self._bytes_of if is_large else {tenant: len(names) for tenant, names in self._names.items()}
            oldest = next(iter(self._names[max(held, key=held.__getitem__)]))
            if oldest in self._kept:
                self._drop(oldest)
            else:
                self._drop_pending(oldest)

    def _drop(self, request_id: str) -> None:
        self._dropped(request_id, self._kept.pop(request_id))

    def _drop_pending(self, request_id: str) -> None:
        self._dropped(request_id, self._pending.pop(request_id))

    def _dropped(self, request_id: str, one: _Kept) -> None:
        self._count(one.tenant, -one.nbytes)
        if request_id in self._kept or request_id in self._pending:
            return
        names = self._names[one.tenant]
        del names[request_id]
        if not names:
            del self._names[one.tenant], self._bytes_of[one.tenant]
