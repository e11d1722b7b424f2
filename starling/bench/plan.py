"""What a run sends: prompts of words, lengths drawn from distributions, arrival times drawn or read from a trace.

Everything comes from one seed.  Prompts and arrivals are drawn from separate sources, so that another rate sends the
same prompts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.errors import InvalidRequest
from starling.bench.distribution import MAX_TOKENS, Lengths
from starling.bench.load import Arrival
from starling.bench.response import ClientRequest
from starling.bench.words import WORDS

SEED_BITS = 31  # of a request's seed; some servers read no more
MAX_LINES = 1_000_000  # of a trace
DAY_S = 86_400.0

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a trace."""

    at_s: Annotated[float, Meta(ge=0, le=DAY_S)]  # from the beginning
    prompt: str | None = None
    prompt_tokens: Tokens | None = None
    max_tokens: Tokens | None = None


class Plan(msgspec.Struct, frozen=True):
    """The requests of a run."""

    model: str
    path: str  # of the endpoint
    is_chat: bool
    prompt_tokens: Lengths
    max_tokens: Lengths
    shared_prefix: int = 0  # tokens that prompts have in common, before their own
    prefixes: int = 1  # different shared prefixes; each request has one of them
    seed: int = 0
    key: str = ""
    fields: dict[str, Any] = {}  # of every body, over those that the plan makes

    def requests(self, part: str = "run") -> Iterator[ClientRequest]:
        """Requests without end. `part`: another one gives other prompts, with the same shared prefixes."""
        writer = _Writer(self, part)
        while True:
            yield writer.request(None, None, None)

    def poisson(self, rate: float) -> Iterator[Arrival]:
        """Arrivals without end, `rate` in a second on average, independent of each other."""
        rng = random.Random(f"{self.seed} arrivals")
        now = 0.0
        for request in self.requests():
            now += rng.expovariate(rate)
            yield Arrival(now, request)

    def replay(self, lines: list[TraceLine]) -> Iterator[Arrival]:
        """The requests of a trace; lengths that it does not give are drawn."""
        writer = _Writer(self, "trace")
        for line in lines:
            yield Arrival(line.at_s, writer.request(line.prompt, line.prompt_tokens, line.max_tokens))


class _Writer:
    """Writes prompts and bodies."""

    def __init__(self, plan: Plan, part: str) -> None:
        self._plan = plan
        self._rng = random.Random(f"{plan.seed} {part}")
        shared = random.Random(f"{plan.seed} prefixes")
        self._prefixes = [words(shared, plan.shared_prefix) for _ in range(plan.prefixes if plan.shared_prefix else 0)]

    def request(self, prompt: str | None, prompt_tokens: int | None, max_tokens: int | None) -> ClientRequest:
        """A request; what is None is drawn."""
        plan, rng = self._plan, self._rng
        if prompt is None:
            prefix = rng.choice(self._prefixes) + " " if self._prefixes else ""
            prompt = prefix + words(rng, prompt_tokens or plan.prompt_tokens.draw(rng))
        content = {"messages": [{"role": "user", "content": prompt}]} if plan.is_chat else {"prompt": prompt}
        body = {
            "model": plan.model,
            **content,
            "max_tokens": max_tokens or plan.max_tokens.draw(rng),
            "seed": rng.getrandbits(SEED_BITS),
            "stream": True,
            "stream_options": {"include_usage": True},
            **plan.fields,
        }
        return ClientRequest(body, plan.key, path=plan.path)


def words(rng: random.Random, count: int) -> str:
    """A text of `count` words."""
    return " ".join(rng.choices(WORDS, k=count))


def read_trace(path: Path) -> list[TraceLine]:
    """The lines of a JSONL file, by time. Raises `InvalidRequest` that names the line, `OSError`."""
    decode = msgspec.json.Decoder(TraceLine).decode
    found = []
    with path.open("rb") as file:
        for number, raw in enumerate(itertools.islice(file, MAX_LINES + 1), 1):
            if not raw.strip():
                continue
            if number > MAX_LINES:
                raise InvalidRequest(f"{path}: more than {MAX_LINES:,} lines; replay it in parts", "trace")
            try:
                line = decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidRequest(
                    f"{path}, line {number}: {error}; expected "
                    '{"at_s": SECONDS, "prompt": TEXT or "prompt_tokens": N, "max_tokens": N}',
                    "trace",
                ) from None
            if line.prompt is not None and line.prompt_tokens is not None:
                raise InvalidRequest(f"{path}, line {number}: give prompt or prompt_tokens, not both", "trace")
            found.append(line)
    if not found:
        raise InvalidRequest(f"{path}: no requests", "trace")
    return sorted(found, key=lambda line: line.at_s)
