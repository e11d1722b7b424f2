"""From the request to load a model to its first token, by where its bytes are.

The blob store is nginx with a bound for each connection.  The ways take turns, round by round, so that what else the
machine does meets all of them.  Before each the agent has its standby engine again.  A check of the instrument: no way
with one connection can be faster than bare requests for the same pieces over one connection, which are measured before
the rounds; and the peer's way must read nothing of the weights from the store.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.catalog.entry import decode
from pipeline.config.schema import DEMO_MODEL
from stages.agent.cache.page_cache import resident_fraction
from tools.bench.fleet.agent_under_test import AgentUnderTest, Site, agent, publish
from tools.bench.fleet.limited_store import LimitedStore, limited_store
from tools.tiny_gguf import Shape, write_model

MB_PER_S = 40.0  # `limit_rate` of one connection, which really carries more (limited_store.py)
RANDOM = "random-500m"
SHAPE = Shape(22, 1280, 20, 5, 64, 4224, 4096)  # 450 million parameters: 480 MB as Q8_0
SETTINGS: dict[str, Any] = {"kv_cache_mb": 64}
ONE_CONNECTION = ("download, then load", "layers as they arrive")  # the ways that use one connection


def measure(rounds: int, names: tuple[str, ...] = (DEMO_MODEL, RANDOM)) -> dict[str, Any]:
    """Seconds by model and way, of all rounds."""
    with tempfile.TemporaryDirectory(prefix="starling-cold-") as folder, ExitStack() as stack:
        site = Site(Path(folder))
        models = [{"name": name, **SETTINGS} for name in names]
        for model in models:
            if model["name"] == RANDOM:
                model["path"] = str(write_model(site.folder / "random.gguf", SHAPE, "Q8_0", seed=1))
        publish(site, site.folder / "blobs", models)
        plain = [{"name": model["name"], **SETTINGS, "path": f"catalog:{model['name']}"} for model in models]
        store = stack.enter_context(limited_store(site.folder / "nginx", site.folder / "blobs", MB_PER_S))
        found: dict[str, Any] = {}
        for name in names:
            entry = decode((site.folder / f"blobs/catalog/{name}.json").read_bytes(), name)
            bare = store.one_connection_s(entry.digest)
            seconds: dict[str, list[float]] = {}
            for _ in range(rounds):
                for way, took in _round(site, store, plain, name):
                    seconds.setdefault(way, []).append(round(took, 2))
            found[name] = summary(entry.nbytes, bare, seconds)
            print(name, found[name], flush=True)
        return {"limit_rate_mb_per_s": MB_PER_S, "rounds": rounds, "models": found}


def summary(nbytes: int, bare: tuple[int, float], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """`bare`: bytes and seconds of bare requests over one connection, by whose rate the size is divided."""
    size_over_rate_s = nbytes * bare[1] / bare[0]
    medians = {way: statistics.median(all_s) for way, all_s in seconds.items()}
    return {
        "bytes": nbytes,
        "measured_mb_per_s": round(bare[0] / bare[1] / 1e6, 1),
        "size_over_rate_s": round(size_over_rate_s, 2),
        "seconds": seconds,
        "medians": medians,
        "of_size_over_rate": {
            way: round(medians[way] / size_over_rate_s, 3) for way in ONE_CONNECTION if way in medians
        },
    }


def _round(site: Site, store: LimitedStore, models: list[Any], name: str) -> Iterator[tuple[str, float]]:
    """Each way once."""
    for way, is_streaming in zip(ONE_CONNECTION, (False, True)):
        settings = {"peers": False, "layer_streaming": is_streaming}
        with agent(site, "one", store.url, models, download_connections=1, agent=settings) as one:
            one.settle()
            yield way, one.first_token_s(name)
            one.unload(name, drop_cached=True)
    with agent(site, "holder", store.url, models) as holder:
        holder.settle()
        yield "parallel ranges", holder.first_token_s(name)
        holder.unload(name)
        before = store.bytes_sent()
        with agent(site, "other", store.url, models) as other:
            other.settle()
            yield "a peer's cache", other.first_token_s(name)
            other.unload(name, drop_cached=True)
        if store.bytes_sent() != before:
            print(f"the store has sent {store.bytes_sent() - before:,} bytes to an agent with a peer", flush=True)
        holder.settle()
        if (left := _drop_from_memory(holder)) < 0.1:
            yield "NVMe", holder.first_token_s(name)
            holder.unload(name)
        else:
            print(f"{left:.0%} of the file stay in memory: NVMe is not measured", flush=True)
        holder.settle()
        yield "page cache", holder.first_token_s(name)
        holder.unload(name, drop_cached=True)


def _drop_from_memory(one: AgentUnderTest) -> float:
    """Drop the checkpoints from the page cache; the fraction of the weights that is still there."""
    for path in one.files():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return max((resident_fraction(path) for path in one.files() if path.suffix == ".bin"), default=0.0)
