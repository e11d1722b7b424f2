"""`python -m tools.bench.http.long_prompt`: the first token of a prompt that takes hours, beside a running stream.

The server computes parts of the prompt, each behind positions that it finds in its KV cache (filled_prefix.py).  So the
time that a token of the prompt takes is measured at several depths, and the time of the whole prompt is the integral
over them.  Each part is two prompts, one of a page and a longer one, whose times are subtracted: what it costs to find
and verify the cached positions is in both.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from shm.checkpoint import load_index
from stages.worker.checkpoint.prepare import prepare
from starling.bench.figures import percentile
from starling.bench.load import drive
from starling.bench.response import ClientRequest, Response
from tools.bench.http import filled_prefix, scenarios
from tools.bench.http.command import describe, kv_cache_mb
from tools.bench.http.server_under_test import ServerUnderTest
from tools.bench.http.workload import body
from tools.bench.offline.results import machine

SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)  # of the prompt: where parts begin, the last one ends
PART = 512  # tokens of the prompt that are timed behind a depth
ALONE_TOKENS = 100  # of the stream before the part, or up to three times as many if it becomes faster
TRIES = 4  # of a part, each with twice the tokens of the stream
COMPUTED = 512  # tokens at most whose pages are copied to all others


class Part(NamedTuple):
    """A part of the prompt. Times in milliseconds."""

    depth: int  # positions before it
    tokens: int
    token_ms: float  # time of a token of the part
    cached_ms: float  # to the first token of a prompt of `depth` cached positions and a page
    steps: int  # events of the stream meanwhile
    usual_p50: float  # gaps of the stream without the part
    usual_p99: float
    beside_p50: float  # and beside it
    beside_p99: float


def integral_ms(parts: Sequence[Part], tokens: int) -> float:
    """The time of `tokens` tokens of a prompt: linear between the middles of parts, constant before and behind them."""
    middles = [part.depth + part.tokens / 2 for part in parts]
    positions = np.unique([0.0, *(middle for middle in middles if middle < tokens), tokens])
    return float(np.trapezoid(np.interp(positions, middles, [part.token_ms for part in parts]), positions))


class LongPrompt:
    """A server with the pages of a prompt of `tokens` token ids."""

    def __init__(self, server: ServerUnderTest, tokens: np.ndarray, page_tokens: int) -> None:
        """Compute the first positions, end the server, fill its arena and start it again."""
        self._server, self._tokens, self._page_tokens = server, tokens, page_tokens
        first = self._prompt(tokens[: min(COMPUTED, len(tokens) // 4) + 1])
        self._send([[first, first]])  # the second one finds the pages: they are full before the server ends
        path = server.arena_dir / f"{server.model}.kv"
        self.filled: list[int] = []
        server.kill_and_start(lambda: self.filled.extend(filled_prefix.fill(path, tokens)))

    def _prompt(self, tokens: np.ndarray, output: int = 1) -> ClientRequest:
        return self._server.request({**body(self._server.model, "", output), "prompt": tokens.tolist()})

    def _send(self, clients: list[list[ClientRequest]], starts: Sequence[float] = ()) -> list[Response]:
        responses = drive(self._server.address, clients, scenarios.LONG_S, starts=starts).responses
        for response in responses:
            if not response.is_complete or response.status != 200:
                raise RuntimeError(f"a request failed: {response.status} {response.error or response.failure}")
        return responses

    def part(self, depth: int, tokens: int, rng: np.random.Generator) -> Part:
        """Compute `tokens` tokens behind `depth` positions, a multiple of a page, beside a stream.

        Repeated with a longer stream where that ends too soon.  Raises `RuntimeError` if the positions were not cached.
        """
        lengths = (self._page_tokens, self._page_tokens + tokens)
        known = self._tokens[:depth]
        (alone,) = self._send([[self._prompt(rng.choice(self._tokens, self._page_tokens), ALONE_TOKENS)]])
        alone_s = alone.ended - alone.head_at
        output = 4 * ALONE_TOKENS + sum(lengths) // 4 + len(lengths)
        for _ in range(TRIES):
            prompts = [self._prompt(np.concatenate([known, rng.choice(self._tokens, n)])) for n in lengths]
            stream = self._prompt(rng.choice(self._tokens, self._page_tokens), output)
            beside, short, long = self._send([[stream], prompts], (0.0, alone_s))
            if (short.cached_tokens, long.cached_tokens) != (depth, depth):
                raise RuntimeError(f"{short.cached_tokens} and {long.cached_tokens} tokens were cached, not {depth}")
            if beside.ended >= long.ended:
                break
            output *= 2
        else:
            raise RuntimeError(f"the stream of {output // 2} tokens ended before the part behind {depth}")
        short_ms, long_ms = (1e3 * (one.ended - one.sent) for one in (short, long))
        began = long.ended - (long_ms - short_ms) / 1e3
        gaps = list(zip(beside.times, list(beside.times)[1:], strict=False))
        usual = [1e3 * (b - a) for a, b in gaps if b <= short.sent or a >= long.ended]
        slow = [1e3 * (b - a) for a, b in gaps if b > began and a < long.ended]
        figures = (percentile(times, share) for times in (usual, slow) for share in (0.5, 0.99))
        return Part(depth, tokens, (long_ms - short_ms) / tokens, short_ms, len(slow), *figures)


def measure(model: ModelConfig, cores: list[int], tokens: int, part: int) -> dict[str, Any]:
    """Measure all parts of a prompt, print them, and return them with the time of the whole prompt."""
    index, page = prepare(model, paths.models_dir()), model.page_tokens
    vocabulary = load_index(index).hyper.vocab_size
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))
    ids = rng.integers(vocabulary // 4, vocabulary // 2, tokens, np.int32)
    # Positions of a part and of its streams, or more, so that nothing is evicted: one repetition on an average.
    beside = 3 * (6 * ALONE_TOKENS + 2 * (part + page))
    arena_mb = kv_cache_mb(model, index, [tokens, *len(SHARES) * [2 * (part + page), beside]])
    settings = {"server": {"request_timeout_ms": int(1000 * scenarios.LONG_S)}}
    with ServerUnderTest(describe(model) | {"kv_cache_mb": arena_mb}, cores, settings, {}) as server:
        prompt = LongPrompt(server, ids, page)
        click.echo(f"{prompt.filled[0]:,} positions were computed, {prompt.filled[1]:,} are in the cache")
        parts = []
        for share in SHARES:
            depth = min(int(share * tokens), tokens - part - page - 1) // page * page
            parts.append(one := prompt.part(depth, part, rng))
            chunk = one.tokens / max(1, one.steps)
            click.echo(
                f"behind {depth:7,}: {one.token_ms:6.1f} ms a token, {chunk:4.1f} tokens a step, gaps p50 and p99 "
                f"{one.usual_p50:.0f} and {one.usual_p99:.0f} -> {one.beside_p50:.0f} and {one.beside_p99:.0f} ms"
            )
    seconds = (integral_ms(parts, tokens) + parts[0].cached_ms) / 1e3
    click.echo(f"{tokens:,} tokens: {seconds:,.0f} s to the first token")
    return {"tokens": tokens, "first_token_s": round(seconds, 1), "parts": [one._asdict() for one in parts]}


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--cores", default="", help="Comma separated; default: two of those allowed.")
@click.option("--prompt", "tokens", default=scenarios.LONG_PROMPT, show_default=True, help="Tokens of the prompt.")
@click.option("--part", default=PART, show_default=True, help="Tokens of it that are computed at each depth.")
def main(gguf: Path | None, cores: str, tokens: int, part: int) -> None:
    """The first token of a long prompt beside a running stream, by parts."""
    numbers = [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]
    model = ModelConfig(name=gguf.stem, path=str(gguf)) if gguf else ModelConfig(name=DEMO_MODEL)
    if part < 1 or tokens < 2 * (part + model.page_tokens):
        least = 2 * (part + model.page_tokens)
        raise click.BadParameter(
            f"a prompt of {tokens} tokens is too short for parts of {part}; expected at least {least}"
        )
    click.echo(json.dumps({"machine": machine(numbers), "long_prompt": measure(model, numbers, tokens, part)}))


if __name__ == "__main__":
    # Context managers end the server: turn SIGTERM into an exception, so that they run.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
