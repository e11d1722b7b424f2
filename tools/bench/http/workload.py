"""The workloads of the benchmark over HTTP, their prompts, and the figures made of the responses."""

from __future__ import annotations

import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stages.tokenizer.opened_models import ModelSource, open_model
from stages.tokenizer.vocabulary import Vocabulary
from starling.bench.figures import percentile
from starling.bench.load import Run
from starling.bench.response import ClientRequest, Response
from starling.bench.words import WORDS

OUTPUT = 64  # tokens of every response
MIN_WORDS = 32  # of prompts, so that no two are alike
WORD = re.compile(rb" [a-z]+")  # a token that is the same whatever words surround it
TENANTS = ("a", "b", "c", "d")  # of the workload that queues; the first one sends as much as the others together


class Work(NamedTuple):
    """`clients` at a time, each with `requests` in sequence; prompts: `prompt` tokens after `shared` common ones."""

    clients: int
    prompt: int
    shared: int = 0
    requests: int = 1

    @property
    def title(self) -> str:
        """The workload as a table shows it."""
        who = f"{self.clients} client" + "s" * (self.clients > 1)
        return f"{who}, {self.prompt} tokens" + (f" after {self.shared} shared" if self.shared else "")


WORKS = (
    Work(1, 100, requests=6),
    Work(8, 100, requests=3),
    Work(16, 100, requests=2),
    Work(8, 500, requests=2),
    Work(16, 100, shared=400, requests=2),
    Work(64, 100),
)


def whole_words(vocabulary: Vocabulary, words: Iterable[str]) -> list[str]:
    """Those of `words` that are one token behind a space."""
    return [word for word in words if len(vocabulary.encode(" " + word, False)) == 1]


class Prompts:
    """Distinct texts with an exact number of tokens: each word is one token."""

    def __init__(self, index_path: Path, seed: int) -> None:
        vocabulary = open_model(ModelSource(index_path)).vocabulary
        self.words = whole_words(vocabulary, WORDS)
        if len(self.words) < MIN_WORDS:  # of a random model: its tokens that are words
            tokens = (vocabulary.token_bytes(token) for token in range(vocabulary.size))
            self.words = whole_words(vocabulary, [one[1:].decode() for one in tokens if WORD.fullmatch(one)])
        if len(self.words) < MIN_WORDS:
            raise RuntimeError(
                f"the model's vocabulary has {len(self.words)} words that are one token, at least {MIN_WORDS} are "
                "needed for distinct prompts: measure another model over HTTP"
            )
        with_bos = vocabulary.encode("", False, add_bos=True)
        self._extra = len(with_bos)
        self._rng = random.Random(seed)

    def text(self, tokens: int) -> str:
        """A text of `tokens` tokens; every word has a space before it, so that it is the same token everywhere."""
        return "".join(" " + word for word in self._rng.choices(self.words, k=tokens))

    def requests(self, work: Work, model: str, keys: Mapping[str, str]) -> list[list[ClientRequest]]:
        """The requests of each client. `keys`: API keys by tenant, for a server that has tenants."""
        shared = self.text(work.shared - self._extra) if work.shared else ""
        own = work.prompt if shared else work.prompt - self._extra
        clients = []
        for i in range(work.clients):
            tenant = _tenant(i, work.clients) if work.clients > 32 else TENANTS[0]
            clients.append(
                [
                    ClientRequest(body(model, shared + self.text(own)), keys.get(tenant, ""), tenant)
                    for _ in range(work.requests)
                ]
            )
        return clients


def _tenant(i: int, clients: int) -> str:
    """The tenant of a client: the first half of the clients belongs to the first tenant."""
    half = clients // 2
    return TENANTS[0] if i < half else TENANTS[1 + (i - half) % (len(TENANTS) - 1)]


def body(model: str, prompt: str, output: int = OUTPUT, **more: Any) -> dict[str, Any]:
    """A body that both servers accept: exactly `output` tokens, greedy."""
    plain = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    return {**plain, "stream": True, "stream_options": {"include_usage": True}, **more}


# ------------------------------------------------------------------ figures


class Outcome(msgspec.Struct):
    """One run of a workload. Times in milliseconds."""

    tokens_per_s: float
    first_p50_ms: float
    first_p95_ms: float
    gap_p50_ms: float
    gap_p95_ms: float
    failed: int
    prompt_tokens: int  # of the median request
    order: dict[str, float] | None = None  # of a workload that queues
    errors: list[str] = []  # messages of failed requests, without repetition


def outcome(work: Work, run: Run) -> Outcome:
    """The figures of one run of a workload."""
    good = [response for response in run.responses if response.is_good]
    ended = max((a.times[-1] for a in good), default=run.ended)
    firsts = [1e3 * a.first_s for a in good]
    gaps = [1e3 * gap for a in good for gap in a.gaps_s]
    return Outcome(
        round(sum(a.tokens for a in good) / max(1e-9, ended - run.began), 1),
        round(percentile(firsts, 0.5), 1),
        round(percentile(firsts, 0.95), 1),
        round(percentile(gaps, 0.5), 2),
        round(percentile(gaps, 0.95), 2),
        len(run.responses) - len(good),
        int(statistics.median([a.prompt_tokens for a in good] or [0])),
        order(good) if work.clients > 32 else None,
        sorted({_why(response) for response in run.responses if not response.is_good})[:4],
    )


def _why(response: Response) -> str:
    return f"{response.status}: {response.error or response.finish or 'no text'}"[:200]


def order(responses: list[Response]) -> dict[str, float]:
    """How evenly tenants were served while all of them had waiting requests.

    `spread` is the largest difference between the numbers of requests that two tenants had begun, counted from the
    first request of each; `first_ms_TENANT` is the tenant's mean time to a first token.
    """
    begun: Counter[str] = Counter()
    total = Counter(a.request.tenant for a in responses)
    spread = 0
    for response in sorted(responses, key=lambda a: a.times[0]):
        begun[response.request.tenant] += 1
        waiting = [t for t in total if begun[t] < total[t]]
        if len(waiting) == len(total) and min(begun[t] for t in total):
            spread = max(spread, max(begun.values()) - min(begun.values()))
    waits = {
        f"first_ms_{t}": round(1e3 * statistics.fmean(a.first_s for a in responses if a.request.tenant == t), 1)
        for t in sorted(total)
    }
    return {"spread": spread, **waits}


class Spread(msgspec.Struct, frozen=True):
    """A figure over the rounds: median, lowest, highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Median and range of `values`."""
        return cls(round(statistics.median(values), 2), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:,.0f} ({self.low:,.0f}-{self.high:,.0f})"


class ServerFigures(msgspec.Struct):
    """One server's figures for a workload over the rounds."""

    tokens_per_s: Spread
    first_p50_ms: Spread
    first_p95_ms: Spread
    gap_p50_ms: Spread
    gap_p95_ms: Spread
    failed: int
    prompt_tokens: int
    order: dict[str, float] | None = None
    errors: list[str] = []

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> ServerFigures:
        """The figures over all rounds of a workload."""
        last = outcomes[-1]
        return cls(
            Spread.of([o.tokens_per_s for o in outcomes]),
            Spread.of([o.first_p50_ms for o in outcomes]),
            Spread.of([o.first_p95_ms for o in outcomes]),
            Spread.of([o.gap_p50_ms for o in outcomes]),
            Spread.of([o.gap_p95_ms for o in outcomes]),
            sum(o.failed for o in outcomes),
            last.prompt_tokens,
            last.order,
            sorted({error for o in outcomes for error in o.errors})[:4],
        )


class Row(msgspec.Struct):
    """A workload and the figures of both servers."""

    work: Work
    candidate: ServerFigures
    baseline: ServerFigures | None = None
    baseline_name: str = "llama-server"  # and how it was started
    first_ratio: float | None = None  # time to a first token, divided by that of the baseline with the shortest one

    @property
    def ratio(self) -> float | None:
        """Throughput of the server under test, divided by that of the baseline."""
        return (
            round(self.candidate.tokens_per_s.median / self.baseline.tokens_per_s.median, 2) if self.baseline else None
        )

    def plain(self) -> dict[str, Any]:
        """The row as it stands in the JSON report."""
        return {**msgspec.to_builtins(self), "work": self.work._asdict(), "ratio": self.ratio}


HEAD = ("workload", "server", "tokens/s", "first p50 / p95 ms", "gap p50 / p95 ms", "failed", "ratio")


def table(rows: list[Row]) -> list[str]:
    """Lines of a table."""
    cells = [HEAD]
    for row in rows:
        servers = (("starling", row.candidate), (row.baseline_name, row.baseline))
        for name, server in servers:
            if server is None:
                continue
            is_candidate = server is row.candidate
            ratio = f"{row.ratio:.2f}" if is_candidate and row.ratio else ""
            cells.append(
                (
                    row.work.title if is_candidate else "",
                    name,
                    str(server.tokens_per_s),
                    f"{server.first_p50_ms.median:,.0f} / {server.first_p95_ms.median:,.0f}",
                    f"{server.gap_p50_ms.median:.1f} / {server.gap_p95_ms.median:.1f}",
                    str(server.failed),
                    ratio,
                )
            )
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
