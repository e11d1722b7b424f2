"""Where the ranks of a group run: the CPU of each, the clusters of their barrier, and the ranks of each memory node.

Ranks of a node are next to each other, so that a node is a range of ranks, and so is a cluster of its barrier.  Ranks
that are not pinned to cores, because there are more ranks than cores, have neither clusters nor nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

from shm import memory_nodes
from stages.worker import rank_clusters


class RankPlaces(NamedTuple):
    """The places of a group's ranks."""

    cpus: list[int]  # those that ranks may be pinned to: rank r to number r, unless there are fewer CPUs
    clusters: tuple[int, ...] = ()  # ranks of each cluster (rank_clusters.py); (): the barrier has none
    nodes: tuple[int, ...] = ()  # ranks of each memory node; (): one node, or the ranks are not pinned

    @property
    def node_cpus(self) -> list[list[int]]:
        """The CPUs of the ranks of each node; [] without nodes."""
        ends = list(accumulate(self.nodes))
        return [self.cpus[end - n : end] for end, n in zip(ends, self.nodes, strict=True)]

    def node_of(self, rank: int) -> int:
        """The number of a rank's node; 0 without nodes."""
        return node_of(self.nodes, rank)


def node_of(nodes: Sequence[int], rank: int) -> int:
    """The number of a rank's node if so many ranks are on each node; 0 without nodes."""
    return sum(end <= rank for end in accumulate(nodes))


def place_ranks(cpus: list[int], ranks: int, root: Path = rank_clusters.CPUS, nodes: Path | None = None) -> RankPlaces:
    """The places of `ranks` ranks on some of these CPUs.

    root: the kernel's folder of CPUs; nodes: its folder of memory nodes.
    """
    if ranks > len(cpus):
        return RankPlaces(cpus)
    by_node = memory_nodes.of(cpus[:ranks], nodes)
    number = {cpu: i for i, some in enumerate(by_node) for cpu in some}
    order, clusters = rank_clusters.arrange([cpu for some in by_node for cpu in some] + cpus[ranks:], ranks, root)
    runs = [(node, len(list(group))) for node, group in groupby(order[:ranks], number.__getitem__)]
    # A node appears twice if clusters were made of sockets that share nodes, which no known machine has.
    is_divided = len(runs) > 1 and len({node for node, _ in runs}) == len(runs)
    return RankPlaces(order, clusters, tuple(n for _, n in runs) if is_divided else ())
