"""The division of cores among the worker groups of a model (`performance.worker_groups`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shm import memory_nodes


def of(cpus: Sequence[int], groups: int | Literal["auto"], ranks: int) -> list[list[int]]:
    """The cores of each group.

    groups: their number; "auto": one on each memory node, or one in all if a node has fewer cores than `ranks`.
    ranks: of each group, as the model has them configured; 0: one on each of its cores.
    """
    if groups == 1:
        return [list(cpus)]
    by_node = memory_nodes.of(cpus)
    if groups == "auto":
        return by_node if min(map(len, by_node)) >= ranks else [list(cpus)]
    return divide(by_node, groups)


def divide(by_node: Sequence[Sequence[int]], groups: int) -> list[list[int]]:
    """Cores, given by memory node, divided among so many groups.

    A group has cores of one node if each node can have equally many groups.  With fewer cores than groups, which
    happens where the server may run on fewer cores than the configuration was checked with, all groups have all.
    """
    flat = [cpu for node in by_node for cpu in node]
    if len(flat) < groups:
        return [list(flat) for _ in range(groups)]
    each, rest = divmod(groups, len(by_node))
    if rest or min(map(len, by_node)) < each:
        return _parts(flat, groups)
    return [part for node in by_node for part in _parts(node, each)]


def _parts(cpus: Sequence[int], n: int) -> list[list[int]]:
    return [list(cpus[i * len(cpus) // n : (i + 1) * len(cpus) // n]) for i in range(n)]
