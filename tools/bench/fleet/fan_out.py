"""Several agents want the same file at once, over a link to the store that they share.

The link carries a bounded number of bytes per second in all, so that without pieces from each other N agents take N
times as long as one.  The check of the instrument is that run: `fleet.agent.peers: false`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.bench.fleet.agent_under_test import POLL_S, Site, agent, publish
from tools.bench.fleet.cold_start import RANDOM, SETTINGS, SHAPE
from tools.bench.fleet.limited_store import LimitedStore, limited_store, link
from tools.tiny_gguf import write_model

LINK_MB_PER_S = 40.0


def measure(rounds: int, n_agents: int) -> dict[str, Any]:
    """Seconds until all have the file, and how often the store was read."""
    with tempfile.TemporaryDirectory(prefix="starling-fan-out-") as folder:
        site = Site(Path(folder))
        path = write_model(site.folder / "random.gguf", SHAPE, "Q8_0", seed=1)
        publish(site, site.folder / "blobs", [{"name": RANDOM, "path": str(path), **SETTINGS}])
        nbytes = sum(one.stat().st_size for one in (site.folder / "blobs").glob("models/*/*.bin"))
        found: dict[str, dict[str, list[float]]] = {}
        with ExitStack() as stack:
            store = stack.enter_context(limited_store(site.folder / "nginx", site.folder / "blobs"))
            url = stack.enter_context(link(store.port, LINK_MB_PER_S))
            for _ in range(rounds):
                for way, count, peers in (("one", 1, True), ("all", n_agents, True), ("all, alone", n_agents, False)):
                    if way == "all, alone" and len(found.get(way, ())):
                        continue  # the check, once: it takes N times as long
                    seconds, read = _once(site, store, url, count, peers)
                    one = found.setdefault(way, {"seconds": [], "store_reads": []})
                    one["seconds"].append(round(seconds, 2))
                    one["store_reads"].append(round(read / nbytes, 2))
                    print(way, round(seconds, 2), "s, store read", round(read / nbytes, 2), "times", flush=True)
        ratio = statistics.median(found["all"]["seconds"]) / statistics.median(found["one"]["seconds"])
        return {"agents": n_agents, "bytes": nbytes, "link_mb_per_s": LINK_MB_PER_S, "ratio": round(ratio, 2), **found}


def _once(site: Site, store: LimitedStore, url: str, count: int, peers: bool) -> tuple[float, int]:
    """Seconds until `count` agents have the file, and bytes that the store has sent."""
    models = [{"name": RANDOM, **SETTINGS, "path": f"catalog:{RANDOM}"}]
    with ExitStack() as stack:
        names = [f"agent-{number}" for number in range(count)]
        # Engines start when the files are here: they would take the cores that the agents share.
        settings = {"peers": peers, "layer_streaming": False}
        agents = [stack.enter_context(agent(site, name, url, models, agent=settings)) for name in names]
        before, begun = store.bytes_sent(), time.perf_counter()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda one: one.begin(RANDOM), agents))
        waiting = list(agents)
        while waiting:
            waiting = [one for one in waiting if not one.has_arrived(RANDOM)]
            time.sleep(POLL_S)
        seconds = time.perf_counter() - begun
        for one in agents:
            one.unload(RANDOM, drop_cached=True)
        return seconds, store.bytes_sent() - before
