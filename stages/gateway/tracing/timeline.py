"""The timeline of one request: its events, and the time that it has spent in each phase.

    admission --> queue --> prefill --> decode --> write
                    ^          |          |
                    `-------- recovery <--'        a stage died; after a preemption straight back to queue

Phases follow one another without gaps, so that their times add up to the duration of the request. A request of several
sequences is in the phase of the one that is furthest. Times are seconds of the gateway's monotonic clock.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from stages.gateway.tracing.trace_context import TraceContext

MAX_EVENTS = 128  # of a request; later prompt chunks are joined, other events are counted

Fact = int | float | str


class Phase(enum.IntEnum):
    """Where the time of a request goes."""

    ADMISSION = 0  # reading and parsing the body, waiting for the model, session, tokens, journal
    QUEUE = 1  # waiting for a row and pages
    PREFILL = 2  # computing the prompt
    DECODE = 3  # computing the output, without the two below
    RECOVERY = 4  # waiting for a stage that has died
    DETOKENIZE = 5  # tokens to text and events
    WRITE = 6  # writing to the connection, and waiting for the client to take the end


class Event(msgspec.Struct, array_like=True):
    """What happened at `at`, in process `pid` of `stage` (0: not known). `choice` -1: to the whole request."""

    at: float
    stage: str
    pid: int
    name: str
    choice: int = -1
    facts: dict[str, Fact] = {}


class Totals(msgspec.Struct):
    """What is known of a request at its end."""

    outcome: str = "open"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


class Report(msgspec.Struct):
    """A timeline as it is stored and printed. `at` of events is relative to `received`, in s."""

    id: str
    request_id: str  # the client's X-Request-Id, or `id`
    tenant: str
    model: str
    session_id: str
    received: float  # s since 1970
    duration_s: float
    phases_s: dict[str, float]  # by name, lower case
    totals: Totals
    events: list[Event]
    omitted: int  # events beyond MAX_EVENTS
    trace_id: str = ""  # of its OpenTelemetry trace


class RequestTrace:
    """The timeline of a request that has not ended, or whose response is still being sent."""

    __slots__ = (
        "_before_recovery",
        "_phase",
        "_since",
        "_spent",
        "client_id",
        "context",
        "detokenize_s",
        "endpoint",
        "events",
        "id",
        "is_single",
        "latest",
        "lost_worker",
        "model",
        "n_readers",
        "omitted",
        "pid",
        "received",
        "session_id",
        "started_at",
        "tenant",
        "totals",
        "version",
        "write_s",
    )

    def __init__(
        self,
        request_id: str,
        started_at: float,
        *,
        tenant: str = "",
        model: str = "",
        client_id: str = "",
        received: float = 0.0,
        pid: int = 0,
        context: TraceContext | None = None,
    ) -> None:
        """`started_at`: when the request was received; `received`: the same, s since 1970. `pid`: the gateway's."""
        self.id = request_id
        self.client_id = client_id
        self.tenant = tenant
        self.model = model
        self.session_id = ""
        self.version = ""  # of the model
        self.started_at = started_at
        self.received = received
        self.pid = pid
        self.context = context
        self.endpoint = ""  # GenerationRequest.endpoint
        self.is_single = True  # it has one sequence
        self.latest = 0.0  # time of the last event of the scheduler
        self.n_readers = 0  # HTTP responses that are being sent
        self.detokenize_s = 0.0  # parts of DECODE and WRITE, measured by the relay
        self.write_s = 0.0
        self.totals: Totals | None = None  # once it has its outcome
        self.events: list[Event] = []
        self.omitted = 0
        self._phase = Phase.ADMISSION
        self._before_recovery = Phase.ADMISSION
        self.lost_worker = 0  # pid of the worker that died last; 0: the model has one, or the scheduler is new
        self._since = started_at
        self._spent = [0.0] * len(Phase)

    # ---------------------------------------------------------------- events

    def add(
        self,
        at: float,
        name: str,
        facts: dict[str, Fact] | None = None,
        *,
        stage: str = "gateway",
        pid: int = -1,
        choice: int = -1,
    ) -> None:
        """Add an event; `pid` -1: of this process."""
        if len(self.events) >= MAX_EVENTS and not (name == "prefill" and self._join(choice, facts or {})):
            self.omitted += 1
            return
        if len(self.events) < MAX_EVENTS:
            self.events.append(Event(at, stage, self.pid if pid < 0 else pid, name, choice, facts or {}))

    def _join(self, choice: int, facts: dict[str, Fact]) -> bool:
        """Add a prompt chunk to the last one of the same sequence, if it continues it."""
        for event in reversed(self.events):
            if event.choice == choice and event.name == "prefill":
                known = event.facts
                if known.get("end") != facts.get("begin"):
                    return False
                known["end"] = facts["end"]
                known["chunks"] = int(known.get("chunks", 1)) + 1
                known["ms"] = round(float(known["ms"]) + float(facts["ms"]), 3)
                return True
        return False

    # ---------------------------------------------------------------- phases

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._phase

    def enter(self, phase: Phase, at: float) -> None:
        """The request is in `phase` from `at` on. An earlier time than that of the last change counts as that."""
        at = max(at, self._since)
        self._spent[self._phase] += at - self._since
        self._phase, self._since = phase, at

    def advance(self, phase: Phase, at: float) -> None:
        """Like `enter`, for one of its sequences: the request does not return to an earlier phase.

        While no worker computes it, a phase begins when one does.
        """
        if self.lost_worker and self._phase is Phase.RECOVERY:
            self._before_recovery = phase if self.is_single else max(phase, self._before_recovery)
        elif self.is_single or phase > self._phase or self._phase is Phase.RECOVERY:
            self.enter(phase, at)

    def suspend(self, at: float, *, is_anew: bool = False) -> None:
        """A stage that computes the request has died. `is_anew`: the scheduler, whose successor queues the request."""
        if self._phase in (Phase.QUEUE, Phase.PREFILL, Phase.DECODE):
            self._before_recovery = self._phase
            self.enter(Phase.RECOVERY, at)
        if is_anew and self._phase is Phase.RECOVERY:
            self._before_recovery = Phase.QUEUE

    def resume(self, at: float) -> None:
        """The stage is back, and has what it had."""
        if self._phase is Phase.RECOVERY:
            self.enter(self._before_recovery, at)

    def end(self, at: float, totals: Totals) -> None:
        """The request has its outcome; the rest of its response is to be written."""
        self.totals = totals
        self.enter(Phase.WRITE, at)

    # ---------------------------------------------------------------- the report

    def phases_s(self, now: float) -> dict[str, float]:
        """Seconds in each phase until `now`; they add up to the time since `started_at`."""
        spent = list(self._spent)
        spent[self._phase] += max(0.0, now - self._since)
        for phase, seconds in ((Phase.DETOKENIZE, self.detokenize_s), (Phase.WRITE, self.write_s)):
            part = min(seconds, spent[Phase.DECODE])
            spent[Phase.DECODE] -= part
            spent[phase] += part
        return {phase.name.lower(): spent[phase] for phase in Phase}

    def report(self, now: float) -> Report:
        """Everything until `now`, with the events in the order of their times."""
        first = self.started_at
        events = [
            Event(max(0.0, event.at - first), event.stage, event.pid, event.name, event.choice, event.facts)
            for event in self.events
        ]
        events.sort(key=lambda event: event.at)
        return Report(
            self.id,
            self.client_id or self.id,
            self.tenant,
            self.model,
            self.session_id,
            self.received,
            max(0.0, now - first),
            self.phases_s(now),
            self.totals or Totals(),
            events,
            self.omitted,
            self.context.trace_id if self.context is not None else "",
        )


def described(report: Report) -> dict[str, Any]:
    """The report in the form of `starling trace --json`: times in ms."""
    return {
        "id": report.id,
        "request_id": report.request_id,
        "trace_id": report.trace_id or None,
        "model": report.model,
        "tenant": report.tenant,
        "session_id": report.session_id or None,
        "outcome": report.totals.outcome,
        "error": report.totals.error or None,
        "received": round(report.received, 6),
        "duration_ms": ms(report.duration_s),
        "phases_ms": {name: ms(seconds) for name, seconds in report.phases_s.items()},
        "prompt_tokens": report.totals.prompt_tokens,
        "cached_tokens": report.totals.cached_tokens,
        "completion_tokens": report.totals.completion_tokens,
        "events": [
            {
                "at_ms": ms(event.at),
                "stage": event.stage,
                "pid": event.pid or None,
                "event": event.name,
                **({"choice": event.choice} if event.choice >= 0 else {}),
                **event.facts,
            }
            for event in report.events
        ],
        "omitted_events": report.omitted,
    }


def ms(seconds: float) -> float:
    """Milliseconds, to the microsecond."""
    return round(seconds * 1000, 3)
