"""`python -m tools.bench.kv`: what the KV cache costs and saves. The last line is one JSON object.

Times are medians over the rounds with the lowest and the highest.  First the KV manager alone, in this process, with
the demo model's pages (32 tokens, f16, 737,280 bytes): restoring reads files from the operating system's page cache,
and a plain read from the disk is measured beside it.  Then a whole server over HTTP (`over_http.py`).
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from pipeline.config.schema import DEMO_MODEL, ModelConfig
from shm import prefix_hash
from shm.pages import PAGE_HEADER, KvArena, KvGeometry
from stages.kv.lease import Grant
from stages.kv.manager import Manager
from stages.kv.pool.page_pool import PagePool
from stages.kv.storage import persist
from stages.kv.storage.disk_store import DiskPageStore
from tools.bench.disturbance import Watch
from tools.bench.http.server_under_test import drop_from_cache
from tools.bench.kv import over_http
from tools.bench.offline.results import machine

GEOMETRY = KvGeometry(30, 3, 64, 32, "f16")
DIGEST = bytes(32)
PROMPT = 4096
PREFIXES = 10_000
PREFIX_TOKENS = 400
RESTORED = 2048


def new_manager(n_pages: int, page_bytes: int, **options: object) -> Manager:
    """A manager of an arena of `n_pages` pages in private memory."""
    arena = KvArena(np.zeros((n_pages, PAGE_HEADER), np.uint8), np.zeros((n_pages, page_bytes), np.uint8))
    pool = PagePool(arena, **options)  # type: ignore[arg-type]
    return Manager(pool, GEOMETRY.page_tokens, prefix_hash.root_hasher(DIGEST, GEOMETRY), lambda *_: None)


def tokens(seed: int, count: int) -> np.ndarray:
    """Random token ids: (count,) i32."""
    return np.random.default_rng(seed).integers(0, 49152, count, np.int32)


def timed(do: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def grant(manager: Manager, who: str, prompt: np.ndarray) -> int:
    """Acquire pages for a prompt; returns the number of cached tokens."""
    response = manager.acquire(who, prompt, len(prompt) + 32, serial=1)
    assert isinstance(response, Grant)
    return response.cached_tokens


def spread(values: list[float], scale: float) -> dict[str, float]:
    """Median and range, scaled."""
    return {
        "median": round(statistics.median(values) * scale, 2),
        "low": round(min(values) * scale, 2),
        "high": round(max(values) * scale, 2),
    }


def measure_lookup(rounds: int) -> dict[str, dict[str, float]]:
    """Acquiring a 4,096-token prompt: nothing cached, nothing cached and pages evicted, everything cached."""
    fresh: list[float] = []
    evicting: list[float] = []
    hit: list[float] = []
    release: list[float] = []
    gc.collect()  # as in the stages: a collection during a measurement must not scan these objects
    gc.freeze()
    manager = new_manager(5 * PROMPT // GEOMETRY.page_tokens // 2, 4096)
    for i in range(rounds):
        prompt = tokens(i, PROMPT)
        has_room = manager.pool.free > PROMPT // GEOMETRY.page_tokens
        seconds = timed(lambda prompt=prompt: grant(manager, "a", prompt))  # type: ignore[misc]
        (fresh if has_room else evicting).append(seconds)
        release.append(timed(lambda: manager.release("a", PROMPT)))
        hit.append(timed(lambda prompt=prompt: grant(manager, "b", prompt)))  # type: ignore[misc]
        manager.release("b", PROMPT)
        if i % 4 == 3:  # free pages again, for the figure without eviction
            manager.pool.remove(list(manager.pool.table.hashes()))
    return {
        "acquire_4096_us": spread(fresh, 1e6),
        "acquire_4096_evicting_us": spread(evicting, 1e6),
        "acquire_4096_all_cached_small_pages_us": spread(hit, 1e6),
        "release_4096_small_pages_us": spread(release, 1e6),
    }


def measure_hit(rounds: int) -> dict[str, dict[str, float]]:
    """Acquiring a cached 4,096-token prompt with pages of full size: every byte is checksummed."""
    manager = new_manager(PROMPT // GEOMETRY.page_tokens + 2, GEOMETRY.page_bytes)
    manager.pool.arena.pages[:] = 1
    prompt = tokens(1, PROMPT)
    commits: list[float] = []
    hits: list[float] = []
    for _ in range(rounds):
        manager.pool.remove(list(manager.pool.table.hashes()))
        grant(manager, "a", prompt)
        commits.append(timed(lambda: manager.commit("a", PROMPT)))
        manager.release("a", PROMPT)
        hits.append(timed(lambda: grant(manager, "b", prompt)))
        manager.release("b", PROMPT)
    return {"name_4096_ms": spread(commits, 1e3), "acquire_4096_all_cached_ms": spread(hits, 1e3)}


def measure_memory() -> float:
    """MB of bookkeeping for 10,000 cached prefixes of 400 tokens that share no page."""
    gc.collect()
    tracemalloc.start()
    each = PREFIX_TOKENS // GEOMETRY.page_tokens
    before = tracemalloc.get_traced_memory()[0]
    headers = np.zeros((PREFIXES * each + 2, PAGE_HEADER), np.uint8)
    contents = np.zeros((PREFIXES * each + 2, 8), np.uint8)
    arenas = headers.nbytes + contents.nbytes  # the arena's own memory is not bookkeeping
    manager = Manager(
        PagePool(KvArena(headers, contents)),
        GEOMETRY.page_tokens,
        prefix_hash.root_hasher(DIGEST, GEOMETRY),
        lambda *_: None,
    )
    for i in range(PREFIXES):
        grant(manager, "a", tokens(i, PREFIX_TOKENS))
        manager.release("a", PREFIX_TOKENS)
    assert manager.pool.cached == PREFIXES * each
    used = tracemalloc.get_traced_memory()[0] - before - arenas
    tracemalloc.stop()
    return used / 1e6


def measure_restore(directory: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Restoring a spilled 2,048-token prefix: from the operating system's page cache and from the disk."""
    count = RESTORED // GEOMETRY.page_tokens
    page_bytes = GEOMETRY.page_bytes
    identity = persist.file_identity("", GEOMETRY)
    path = directory / "bench.pages"
    store = DiskPageStore(path, identity, page_bytes, 2 * count * page_bytes, persist.IN_SPILL)
    manager = new_manager(count + 2, page_bytes, spill=store, stores=[store])
    rng = np.random.default_rng(0)
    manager.pool.arena.pages[:] = rng.integers(0, 256, manager.pool.arena.pages.shape, np.uint8)
    prompt, other = tokens(1, RESTORED + 1), tokens(2, RESTORED + 1)
    grant(manager, "a", prompt)
    manager.release("a", RESTORED + 1)
    spill = timed(lambda: grant(manager, "flood", other))
    manager.release("flood", 0)
    warm: list[float] = []
    cold: list[float] = []
    sequential: list[float] = []
    for _ in range(rounds):
        for times, is_cold in ((warm, False), (cold, True)):
            if is_cold:  # mapped pages stay in the cache: close the file first
                store.close()
                drop_from_cache(path)
                store = DiskPageStore(path, identity, page_bytes, 2 * count * page_bytes, persist.IN_SPILL)
            manager = new_manager(count + 2, page_bytes, spill=store, stores=[store])
            manager.pool.arena.pages[:] = 1  # touch every page, so that its memory is allocated as in the server
            begun = time.perf_counter()
            assert grant(manager, "c", prompt) == RESTORED
            times.append(time.perf_counter() - begun)
        store.close()
        drop_from_cache(path)
        sequential.append(read_file(path))
        store = DiskPageStore(path, identity, page_bytes, 2 * count * page_bytes, persist.IN_SPILL)
    store.close()
    megabytes = count * page_bytes / 1e6
    return {
        "spill_2048_ms": spread([spill], 1e3),
        "restore_2048_ms": spread(warm, 1e3),
        "restore_2048_from_disk_ms": spread(cold, 1e3),
        "sequential_read_same_bytes_ms": spread([t * megabytes for t in sequential], 1e3),
    }


def read_file(path: Path) -> float:
    """Seconds for each MB of a plain sequential read."""
    buffer = bytearray(8 << 20)
    total = 0
    begun = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            total += n
    return (time.perf_counter() - begun) / (total / 1e6)


def measure(
    model: ModelConfig, cores: list[int], rounds: int, directory: Path | None = None, http: bool = True
) -> dict[str, Any]:
    """All figures, printed as they are measured. `directory`: on the disk that is to be measured."""
    figures: dict[str, Any] = {}

    def show(found: dict[str, Any]) -> None:
        figures.update(found)
        for name, value in found.items():
            click.echo(f"kv: {name:42} {value}")

    show(measure_lookup(16 * rounds))
    show(measure_hit(rounds))
    show({"bookkeeping_10000_prefixes_mb": round(measure_memory(), 1)})
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        show(measure_restore(Path(scratch), rounds))
    if http:
        named = {"name": model.name, **({"path": model.path} if model.path else {})}
        show(over_http.measure(named, cores, max(1, rounds // 2)))
    return figures


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), help="A directory on the disk to be measured.")
@click.option("--cores", default="", help="The server's cores, comma separated; default: two of those allowed.")
@click.option("--http/--no-http", default=True, show_default=True, help="Measure a server of the demo model as well.")
def main(rounds: int, directory: Path | None, cores: str, http: bool) -> None:
    """What the KV cache costs and saves."""
    numbers = [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]
    watch = Watch([], numbers)
    figures, signs = watch.observe(lambda: measure(ModelConfig(name=DEMO_MODEL), numbers, rounds, directory, http))
    # A server of the benchmark is not told apart from other programs.
    report = {"machine": machine(numbers), "signs": signs._asdict(), "kv": figures}
    click.echo(msgspec.json.encode(report).decode())


def run() -> None:
    """Run the command as a program."""
    # A context manager ends the server: turn SIGTERM into an exception, so that it runs.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
