"""Journal records of a fixed time, and the functions that write and read them, for several test modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.protocol.messages import Sampling
from stages.gateway.endpoints.generation_request import GenerationRequest
from stages.gateway.requests.journal import Ended, Journal, Line, Opened

NOW = 1e9


def opened(name: str, prompt: bytes = b"1234") -> Opened:
    ask = GenerationRequest(endpoint="chat", model="m", stream=True, stop=("\n",), seed=2**64 - 1)
    sampling = Sampling(seed=2**64 - 1, logit_bias=((3, -1.5),))
    return Opened(
        name,
        "tenant",
        "m",
        "ab" * 32,
        1,
        ask,
        2**64 - 1,
        17,
        "fp",
        NOW + 60,
        0,
        name,
        [prompt],
        ["echo"],
        [Line(0, 0, 0, 9, sampling, (1, 2)), Line(0, 0, 1, 9, sampling, (1, 2))],
    )


def journal(directory: Path, max_bytes: int = 1 << 20, wall: Callable[[], float] = lambda: NOW) -> Journal:
    return Journal(directory, max_bytes, wall)


def found(directory: Path, wall: Callable[[], float] = lambda: NOW) -> dict[str, Ended | None]:
    reader = journal(directory, wall=wall)
    reader.close()
    entries = reader.take_entries()
    for entry in entries:
        assert entry.opened == opened(entry.opened.id, entry.opened.prompts[0])
    return {entry.opened.id: entry.ended for entry in entries}
