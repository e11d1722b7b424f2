"""What the tests send, and what they compare of the answers."""

from __future__ import annotations

import re
from typing import Any

from tests.e2e.server import poll_until
from tests.gateway.peers import MODEL
from tests.gateway.server import Server

MINE, OTHER = {"Authorization": "Bearer sk-mine"}, {"Authorization": "Bearer sk-other"}
SAID = "please say the old lighthouse keeper climbed the stairs"
BODY: dict[str, Any] = {"model": MODEL, "prompt": SAID, "max_tokens": 40, "seed": 7, "ignore_eos": True}


def plain(raw: bytes) -> bytes:
    """An answer without what differs from request to request: id, time and cache hits."""
    raw = re.sub(rb'("created|"cached_tokens|"cache_read_input_tokens)":\d+', rb'\1":0', raw)
    raw = re.sub(rb"[0-9a-f]{24}", b"ID", raw)
    if b'"index":1' not in raw or b"data: " not in raw:
        return raw
    # Events of several choices are interleaved as the tokens come: each choice's are in order.
    data = [line for line in raw.splitlines() if line.startswith(b"data: ")]
    return b"\n".join(sorted(data, key=lambda line: b'"index":1' in line))


def hold(engine: Server, is_held: bool = True) -> None:
    engine.peers.do(lambda: setattr(engine.peers, "is_stepping", not is_held))


def step(engine: Server, times: int) -> None:
    """Wait for a sequence, which may still be on its way to the engine, and generate tokens of it."""
    poll_until(lambda: engine.peers.do(lambda: bool(engine.peers.generator.running)))
    for _ in range(times):
        engine.peers.do(lambda: engine.peers.generator.step(1))
