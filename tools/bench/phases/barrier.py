"""Times the barrier of ranks (shm/barrier.py), with clusters and without, in turns.

    python -m tools.bench.phases.barrier [--ranks 2,4,8,16] [--cluster 4] [--rounds 7]

Ranks are processes, pinned to the allowed cores in turn.  With more ranks than cores most of the time is that of the
kernel's scheduler: the ranks of a core wait for each other to sleep.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics

import click
import numba
import numpy as np

from shm import barrier, words
from shm.atomics import monotonic_ns
from stages.worker.activations_arena import BARRIER, CLUSTERS, CONTROL_WORDS, LINES, reset_barrier

ROUND_NS = 150_000_000  # of one measurement, about


@numba.njit(nogil=True)
def _pass(base: int, rank: int, ranks: int, times: int, in_clusters: bool) -> int:
    """Nanoseconds that a rank takes for so many barriers."""
    begun = monotonic_ns()
    for _ in range(times):
        if in_clusters:
            barrier.wait_in_clusters(base + 8 * BARRIER, base + 8 * LINES, base + 8 * CLUSTERS, rank, ranks)
        else:
            barrier.wait(base + 8 * BARRIER, base + 8 * LINES, rank, ranks)
    return monotonic_ns() - begun


def _time(shared: np.ndarray, ranks: int, clusters: tuple[int, ...], times: int, cores: list[int]) -> float:
    """Microseconds of a barrier, of rank 0."""
    reset_barrier(shared, ranks, clusters)
    base, pids = shared.ctypes.data, []
    for rank in range(1, ranks):
        pid = os.fork()
        if not pid:
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
            _pass(base, rank, ranks, times + 1, bool(clusters))
            os._exit(0)
        pids.append(pid)
    os.sched_setaffinity(0, {cores[0]})
    _pass(base, 0, ranks, 1, bool(clusters))  # until all have begun
    took = _pass(base, 0, ranks, times, bool(clusters))
    for pid in pids:
        os.waitpid(pid, 0)
    os.sched_setaffinity(0, set(cores))
    return took / times / 1000


@click.command(help=__doc__)
@click.option("--ranks", default="2,4,8,16", help="numbers of ranks")
@click.option("--cluster", default=4, help="ranks of a cluster; for fewer ranks than two clusters: half of them")
@click.option("--rounds", default=7, help="measurements of each")
def main(ranks: str, cluster: int, rounds: int) -> None:
    """Print a JSON line: by ranks, microseconds of a barrier (median, least, most) without clusters and with."""
    cores = sorted(os.sched_getaffinity(0))
    shared = np.frombuffer(mmap.mmap(-1, 8 * CONTROL_WORDS), np.int64)
    reset_barrier(shared, 1, (1,))
    for in_clusters in (False, True):
        _pass(shared.ctypes.data, 0, 1, 1, in_clusters)
    found: dict[str, object] = {"cores": len(cores)}
    for n in map(int, ranks.split(",")):
        size = min(cluster, max(1, n // 2))
        sides = {"flat": (), "clusters": tuple(min(size, n - at) for at in range(0, n, size))}
        times = {}
        for name, clusters in sides.items():
            some = _time(shared, n, clusters, 20, cores)
            times[name] = max(20, int(ROUND_NS / 1000 / some))
        spans: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(rounds):
            for name in list(sides)[:: 1 - 2 * (i % 2)]:
                spans[name].append(_time(shared, n, sides[name], times[name], cores))
        found[str(n)] = {
            name: [round(f(all_), 2) for f in (statistics.median, min, max)] for name, all_ in spans.items()
        }
        assert words.load(shared, BARRIER) > 0
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
