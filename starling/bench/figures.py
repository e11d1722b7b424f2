"""The figures of a run: latencies, throughput, failures by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from starling.bench.load import Run
from starling.bench.response import UNFINISHED, Response

MAX_SHOWN = 5  # of the requests that failed in one way


def percentile(values: Sequence[float], part: float) -> float:
    """The nearest-rank percentile: the smallest value that `part` of all do not exceed; 0.0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


class Latency(msgspec.Struct, frozen=True):
    """The distribution of a latency, milliseconds."""

    count: int
    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latency:
        """Of latencies in seconds."""
        ordered = sorted(1e3 * value for value in seconds)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ranks = (percentile(ordered, part) for part in (0.5, 0.9, 0.99))
        mean = math.fsum(ordered) / len(ordered)
        return cls(len(ordered), *(round(value, 3) for value in (*ranks, mean, ordered[-1])))


class Figures(msgspec.Struct, kw_only=True):
    """Latencies are of complete responses; an open loop's count from the moment at which a request was due."""

    seconds: float  # from the first request to the last byte
    requests: int
    complete: int
    failed: int
    unfinished: int  # under way when the run was interrupted
    failures: dict[str, int]  # by kind
    messages: dict[str, str]  # the first of each kind
    failed_requests: dict[str, list[int]]  # by kind, the first `MAX_SHOWN`: 1 is the request that was sent first
    failed_ids: dict[str, str]  # of the first of each kind, if the server has sent one
    first_token_ms: Latency
    between_tokens_ms: Latency  # events with output; a server may send several tokens in one
    per_token_ms: Latency  # of a request: from its first output to its last, by the number of tokens
    end_to_end_ms: Latency
    sent_late_ms: Latency  # from the moment at which a request was due until it was sent
    output_tokens: int  # of complete and unfinished responses
    output_events: int
    output_tokens_per_s: float
    requests_per_s: float  # complete ones
    prompt_tokens: int  # of complete responses, as the server counts
    cached_tokens: int  # of these
    uncounted: int  # responses with output and without `usage`, whose events are counted as tokens


def measure(run: Run) -> Figures:
    """The figures of a run, whose responses are parsed."""
    complete = [response for response in run.responses if response.is_complete]
    unfinished = [response for response in run.responses if response.failure == UNFINISHED]
    failed = [
        (number, response)
        for number, response in enumerate(run.responses, 1)
        if response.failure and response.failure != UNFINISHED
    ]
    kinds = Counter(response.failure for _, response in failed)
    messages: dict[str, str] = {}
    numbers: dict[str, list[int]] = {kind: [] for kind in kinds}
    ids: dict[str, str] = {}
    for number, response in failed:
        messages.setdefault(response.failure, response.error)
        if not numbers[response.failure] and response.id:
            ids[response.failure] = response.id
        if len(numbers[response.failure]) < MAX_SHOWN:
            numbers[response.failure].append(number)
    counted = [*complete, *unfinished]
    ended = max((response.ended for response in complete), default=run.ended)
    ended = max([ended, *(response.times[-1] for response in unfinished if response.times)])
    seconds = max(1e-9, ended - run.began)
    tokens = sum(response.tokens for response in counted)
    with_output = [response for response in complete if response.times]
    return Figures(
        seconds=round(seconds, 6),
        requests=len(run.responses),
        complete=len(complete),
        failed=len(failed),
        unfinished=len(unfinished),
        failures=dict(kinds.most_common()),
        messages=messages,
        failed_requests=numbers,
        failed_ids=ids,
        first_token_ms=Latency.of(response.first_s for response in with_output),
        between_tokens_ms=Latency.of(gap for response in complete for gap in response.gaps_s),
        per_token_ms=Latency.of(
            (response.times[-1] - response.times[0]) / (response.tokens - 1)
            for response in with_output
            if response.tokens > 1
        ),
        end_to_end_ms=Latency.of(response.total_s for response in complete),
        sent_late_ms=Latency.of(response.sent - response.due for response in run.responses),
        output_tokens=tokens,
        output_events=sum(len(response.times) for response in counted),
        output_tokens_per_s=round(tokens / seconds, 2),
        requests_per_s=round(len(complete) / seconds, 3),
        prompt_tokens=sum(response.prompt_tokens for response in complete),
        cached_tokens=sum(response.cached_tokens for response in complete),
        uncounted=sum(bool(response.times) and not response.has_usage for response in complete),
    )


class Record(msgspec.Struct, omit_defaults=True):
    """One request in the report. Times are seconds from the beginning of the run; 0 for what did not happen."""

    due_s: float
    sent_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    id: str = ""  # the server's
    failure: str = ""
    error: str = ""
    finish: str = ""
    output_tokens: int = 0
    output_events: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, response: Response, began: float) -> Record:
        """The record of a response."""

        def since(when: float) -> float:
            return round(when - began, 6) if when else 0.0

        return cls(
            round(response.due - began, 6),
            round(response.sent - began, 6),
            since(response.times[0]) if response.times else 0.0,
            since(response.ended),
            response.status,
            response.id,
            response.failure,
            response.error,
            response.finish,
            response.tokens,
            len(response.times),
            response.prompt_tokens,
            response.cached_tokens,
        )


# ------------------------------------------------------------------ text

ROWS = ("first token", "between tokens", "per token", "end to end", "sent late")
COLUMNS = 80
LEAST_COLUMNS = 56  # the table is not made narrower


def lines(figures: Figures, is_open: bool, columns: int = COLUMNS) -> list[str]:
    """The figures in lines of at most 80 columns; the table has `columns`, if they are more than `LEAST_COLUMNS`."""
    wide = min(12, (max(LEAST_COLUMNS, columns) - 16) // 5)
    found = [f"{'milliseconds':<16}" + "".join(f"{name:>{wide}}" for name in ("p50", "p90", "p99", "mean", "max"))]
    rows = (
        figures.first_token_ms,
        figures.between_tokens_ms,
        figures.per_token_ms,
        figures.end_to_end_ms,
        figures.sent_late_ms,
    )
    for title, row in list(zip(ROWS, rows, strict=True))[: 5 if is_open else 4]:
        values = (row.p50, row.p90, row.p99, row.mean, row.max)
        found.append(f"{title:<16}" + "".join(f"{_number(v) if row.count else '-':>{wide}}" for v in values))
    found.append("")
    found.append(
        f"output  {figures.output_tokens:,} tokens, {figures.output_tokens_per_s:,.1f} tokens/s, "
        f"{figures.requests_per_s:,.2f} requests/s"
    )
    if figures.prompt_tokens:
        found.append(f"prompts {figures.prompt_tokens:,} tokens, {figures.cached_tokens:,} of them cached")
    if figures.uncounted:
        found.append(f"{figures.uncounted} responses came without usage: their events are counted as tokens")
    for kind, count in figures.failures.items():
        message = " ".join(figures.messages[kind].split())
        found.append(f"failed  {count:,} x {kind}" + (f": {message}" if message != kind else ""))
        found.append(" " * 8 + _which(figures, kind, count))
    if figures.unfinished:
        found.append(f"under way at the end: {figures.unfinished:,}")
    return [line[:COLUMNS].rstrip() for line in found]


def _which(figures: Figures, kind: str, count: int) -> str:
    """Which requests failed in this way, and by which name the server's logs have the first one."""
    numbers = figures.failed_requests[kind]
    more = f" and {count - len(numbers):,} more" if count > len(numbers) else ""
    name = f"; {numbers[0]} is {figures.failed_ids[kind]}" if kind in figures.failed_ids else ""
    return f"request{'s' * (count > 1)} {', '.join(map(str, numbers))}{more}{name}"


def _number(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"
