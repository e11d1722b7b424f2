"""Clusters of ranks follow the caches and sockets that the kernel shows, here of emulated machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.worker.rank_clusters import MAX_CLUSTER, MIN_RANKS, arrange
from tests.emulated_machine import machine


def test_ranks_that_share_a_cache_are_a_cluster(tmp_path: Path) -> None:
    root = machine(tmp_path, [n // 4 for n in range(16)], [n // 8 for n in range(16)])
    assert arrange(list(range(16)), 16, root) == (list(range(16)), (4, 4, 4, 4))
    assert arrange(list(range(16)), 12, root) == (list(range(16)), (4, 4, 4))
    six = machine(tmp_path / "six", [n // 6 for n in range(16)], [0] * 16)
    cpus = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    assert arrange(cpus, 12, six) == (cpus, (6, 4, 2))


def test_cores_of_two_sockets_that_are_numbered_in_turns_are_put_together(tmp_path: Path) -> None:
    root = machine(tmp_path, [n % 2 for n in range(12)], [n % 2 for n in range(12)])
    order, clusters = arrange(list(range(12)), 10, root)
    assert (order, clusters) == ([0, 2, 4, 6, 8, 1, 3, 5, 7, 9, 10, 11], (5, 5))


def test_sockets_count_where_the_kernel_shows_a_cache_for_every_core_or_none(tmp_path: Path) -> None:
    for name, caches in (("each", list(range(16))), ("none", [-1] * 16)):
        root = machine(tmp_path / name, caches, [n // 8 for n in range(16)])
        assert arrange(list(range(16)), 16, root) == (list(range(16)), (8, 8))


def test_caches_of_few_cores_make_no_clusters(tmp_path: Path) -> None:
    cpus = list(range(20))
    two = machine(tmp_path / "two", [n // 2 for n in cpus], [n // 10 for n in cpus])
    assert arrange(cpus, 8, two) == (cpus, ())
    assert arrange(cpus, 20, two) == (cpus, (10, 10))
    one = machine(tmp_path / "one", [n // 2 for n in cpus], [0] * 20)
    assert arrange(cpus, 16, one) == (cpus, ())
    assert arrange(cpus, 18, one) == (cpus, (9, 9))  # the first one has a core of the fifth cache
    three = machine(tmp_path / "three", [n // 3 for n in cpus], [0] * 20)
    assert arrange(cpus, 12, three) == (cpus, ())


@pytest.mark.parametrize("ranks", [1, 2, MIN_RANKS - 1, MIN_RANKS, MAX_CLUSTER])
def test_few_ranks_and_ranks_that_share_everything_have_no_clusters(tmp_path: Path, ranks: int) -> None:
    cpus = list(range(MAX_CLUSTER))
    one = machine(tmp_path / "one", [0] * MAX_CLUSTER, [0] * MAX_CLUSTER)
    assert arrange(cpus, ranks, one) == (cpus, ())
    if ranks < MIN_RANKS:
        two = machine(tmp_path / "two", [n % 2 for n in cpus], [n % 2 for n in cpus])
        assert arrange(cpus, ranks, two) == (cpus, ())


def test_a_large_cluster_is_divided(tmp_path: Path) -> None:
    cpus = list(range(48))
    one = machine(tmp_path / "one", [0] * 48, [0] * 48)
    assert arrange(cpus, 48, one) == (cpus, (16, 16, 16))
    assert arrange(cpus, 17, one) == (cpus, (8, 9))
    two = machine(tmp_path / "two", [n // 20 for n in cpus], [n // 20 for n in cpus])
    assert arrange(cpus, 40, two) == (cpus, (10, 10, 10, 10))


def test_ranks_that_are_not_pinned_and_unknown_cores_have_no_clusters(tmp_path: Path) -> None:
    root = machine(tmp_path / "known", [n // 8 for n in range(16)], [n // 8 for n in range(16)])
    assert arrange(list(range(16)), 17, root) == (list(range(16)), ())
    assert arrange(list(range(16)), 16, tmp_path / "missing") == (list(range(16)), ())
