"""The table of a run: streams and pauses for each kind of fault.

A pause is the longest time without an event on a stream, between a fault and the recovery after it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from starling.chaos.client import Outcome
from starling.chaos.traffic import Traffic


@dataclass
class Event:
    """A fault that was injected. Times are those of the monotonic clock, in seconds."""

    kind: str
    what: str  # description
    at: float
    over: float = 0.0  # its end, if it lasts; else 0.0
    until: float = 0.0  # the recovery after it
    recovered: bool = True


@dataclass
class Row:
    """One line of the table: the streams that were in flight at a kind of fault."""

    fault: str
    faults: int = 0
    streams: int = 0
    identical: int = 0
    different: int = 0
    lost: int = 0
    resumed: int = 0  # connections that ended too early
    pauses_ms: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Counts, and the 50th and 95th percentile and the largest of the pauses (ms)."""
        ordered = sorted(self.pauses_ms)

        def at(q: float) -> float | None:
            return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1) if ordered else None

        return {
            "fault": self.fault,
            "faults": self.faults,
            "streams": self.streams,
            "identical": self.identical,
            "different": self.different,
            "lost": self.lost,
            "resumed": self.resumed,
            "pause_ms_p50": round(statistics.median(ordered), 1) if ordered else None,
            "pause_ms_p95": at(0.95),
            "pause_ms_max": at(1.0),
        }


def tabulate(traffic: Traffic, events: list[Event]) -> list[Row]:
    """A row for each kind of fault, over the streams that were in flight at it, and a row for all streams."""
    rows: dict[str, Row] = {}
    for event in events:
        row = rows.setdefault(event.kind, Row(event.kind))
        row.faults += 1
        for outcome in traffic.outcomes:
            if outcome.begun <= max(event.at, event.over) and outcome.ended >= event.at:
                _count(row, outcome, traffic)
                row.pauses_ms.append(outcome.longest_gap_ms(event.at, event.until or outcome.ended))
    total = Row("all streams", len(events))
    for outcome in traffic.outcomes:
        _count(total, outcome, traffic)
    return [*rows.values(), total]


def _count(row: Row, outcome: Outcome, traffic: Traffic) -> None:
    row.streams += 1
    row.resumed += outcome.resumed
    verdict = traffic.verdict(outcome)
    setattr(row, verdict, getattr(row, verdict) + 1)
