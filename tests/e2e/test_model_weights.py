"""Two models on the same cores compute in proportion to their weights while both are busy."""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.core_waits import Sleeper
from tests.e2e.server import Server
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

WEIGHTS = {"heavy": 3.0, "light": 1.0}
REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 1800, "seed": 5, "ignore_eos": True}
BEGIN, END = 200, 1700  # tokens of the heavy model between which the light one's are counted
LIGHT_BEGIN = 80  # tokens of the light one before: then the heavy one's that waited for its first have been read
PARTS = 5  # of these tokens: the middle ratio counts, so that a pause of one worker changes it little
ATTEMPTS = 3  # to measure while this process, which counts the tokens as it reads them, has a core
LATE_S = 0.25  # a longer wait for one: it has read tokens of both models later than they were generated


def measure(server: Server) -> tuple[float, list[int]]:
    """The ratio of the tokens that both models generate while both are busy, and the counts of the light one's."""
    counts = dict.fromkeys(WEIGHTS, 0)
    light_at: dict[int, int] = {}  # tokens of the light model by tokens of the heavy one
    both = threading.Barrier(2)

    def read(name: str) -> None:
        for event in server.stream("/v1/generate", model=name, **REQUEST):
            if not counts[name]:
                both.wait(60)
            counts[name] += len(event.get("tokens", ()))
            if name == "heavy":
                light_at[counts["heavy"]] = counts["light"]

    threads = [threading.Thread(target=read, args=(name,)) for name in WEIGHTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == dict.fromkeys(WEIGHTS, REQUEST["max_tokens"])
    begin = min((at for at, light in light_at.items() if at >= BEGIN and light >= LIGHT_BEGIN), default=END)
    borders = [min(at for at in light_at if at >= begin + part * (END - begin) // PARTS) for part in range(PARTS + 1)]
    parts = [(end - start) / max(1, light_at[end] - light_at[start]) for start, end in pairwise(borders)]
    return statistics.median(parts), [light_at[at] for at in borders]


def test_throughput_follows_the_weights(tmp_path: Path) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    models = [{"name": name, "path": str(path), "kv_cache_mb": 8, "weight": weight} for name, weight in WEIGHTS.items()]
    with Server(tmp_path, {"models": models}) as server:
        for _ in range(ATTEMPTS):
            sleeper, since = Sleeper(), time.monotonic()
            ratio, counts = measure(server)
            sleeper.stop()
            if sleeper.late_s(since, time.monotonic()) < LATE_S:
                break
        server.stop()
    # One stream does not use all of its model's turns: 2.2 to 2.5 is usual, and 1.0 with equal weights.
    assert 1.6 < ratio < 4.2, (ratio, counts)
