"""Which ranks form a cluster of the barrier (shm/barrier.py): those whose cores share a cache, or else a socket.

A barrier with clusters has one step more in each direction, so that it is for many ranks on cores that are far from
each other.  Ranks that are not pinned to cores, because there are more ranks than cores, have no clusters.

More than MAX_CLUSTER ranks for which neither caches nor sockets make clusters, or that share one, are divided in the
order of their CPUs' numbers.  Such a cluster may have ranks of two caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
MIN_RANKS = 8  # with fewer, rank 0 collects all arrivals in the time that another level would take
MIN_MEAN = 4  # ranks of a cluster, on average: smaller ones leave rank 0 many leaders to wait for
MAX_CLUSTER = 16  # ranks whose arrivals one leader collects


def _last_level_cache(cpu: Path) -> str:
    """The CPUs that share the third-level cache, as the kernel lists them; "" if there is none."""
    for index in sorted(cpu.glob("cache/index*")):
        if (index / "level").read_text().strip() == "3":
            return (index / "shared_cpu_list").read_text().strip()
    return ""


def _socket(cpu: Path) -> str:
    return (cpu / "topology" / "physical_package_id").read_text().strip()


def _places(cpus: list[int], read: Callable[[Path], str], root: Path) -> list[str]:
    """What `read` finds for each CPU; "" for those of which the kernel says nothing."""
    found = []
    for cpu in cpus:
        try:
            found.append(read(root / f"cpu{cpu}"))
        except OSError:
            found.append("")
    return found


def arrange(cpus: list[int], ranks: int, root: Path = CPUS) -> tuple[list[int], tuple[int, ...]]:
    """The CPUs of the ranks in order, and the number of ranks of each cluster; () if the barrier shall have none.

    cpus: those that the ranks may be pinned to; the same ones are used, those of a cluster next to each other.
    root: the kernel's folder of CPUs.
    """
    if ranks < MIN_RANKS or ranks > len(cpus):
        return cpus, ()
    used = cpus[:ranks]
    for read in (_last_level_cache, _socket):
        places = _places(used, read, root)
        order = list(dict.fromkeys(places))
        if _are_worth_it(len(order), ranks):
            together = sorted(zip(places, used, strict=True), key=lambda one: order.index(one[0]))
            shared = [len(list(group)) for _, group in groupby(place for place, _ in together)]
            return [cpu for _, cpu in together] + cpus[ranks:], sizes(shared)
    return cpus, sizes([ranks])


def _are_worth_it(clusters: int, ranks: int) -> bool:
    return 1 < clusters <= ranks // MIN_MEAN  # virtual machines may show a cache, or a socket, for every core


def sizes(shared: Sequence[int]) -> tuple[int, ...]:
    """The number of ranks of each cluster, () for none; `shared`: how many ranks share each cache, or socket."""
    ranks = sum(shared)
    if ranks < MIN_RANKS:
        return ()
    if _are_worth_it(len(shared), ranks):
        return tuple(part for n in shared for part in _parts(n))
    return _parts(ranks) if ranks > MAX_CLUSTER else ()


def _parts(ranks: int) -> tuple[int, ...]:
    """A cluster as few ones of at most MAX_CLUSTER ranks and about the same size."""
    n = -(-ranks // MAX_CLUSTER)
    return tuple(ranks * (i + 1) // n - ranks * i // n for i in range(n))
