"""Time from a request to the first byte of its first token, over HTTP, from a server that is up."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tools.bench.offline.results import Rate


def first_byte(url: str, prompt_tokens: int = 16, repeats: int = 20) -> dict[str, Any] | None:
    """Milliseconds over `repeats` requests one after the other; None when no server listens at `url`.

    Prompts are random ids, so that no prompt is in the prefix cache.  Raises `RuntimeError` for a refusal.
    """
    rng = np.random.default_rng(time.time_ns())
    where = urlsplit(url)
    spans = []
    for _ in range(repeats + 1):
        connection = http.client.HTTPConnection(where.hostname or "127.0.0.1", where.port or 80, timeout=60)
        body = {"prompt": rng.integers(300, 1000, prompt_tokens).tolist(), "max_tokens": 1, "stream": True}
        try:
            connection.connect()
            begun = time.perf_counter()
            connection.request("POST", "/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{url}: {response.status} {response.read(300).decode(errors='replace')}")
            while not response.readline().startswith(b"data:"):
                if response.isclosed():
                    raise RuntimeError(f"{url}: the stream ended before its first token")
            spans.append(1000 * (time.perf_counter() - begun))
            response.read()
        except ConnectionRefusedError:
            return None
        finally:
            connection.close()
    found = Rate.of(spans[1:])  # the first request fills caches
    return {"prompt_tokens": prompt_tokens, "median_ms": found.median, "low_ms": found.low, "high_ms": found.high}
