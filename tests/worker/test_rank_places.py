"""Ranks are placed by memory node and cluster, here of emulated machines."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stages.worker.rank_places import RankPlaces, node_of, place_ranks
from tests.emulated_machine import machine, memory_nodes


def test_two_sockets_of_32_cores(tmp_path: Path) -> None:
    root = machine(tmp_path / "cpu", [n // 32 for n in range(64)], [n // 32 for n in range(64)])
    nodes = memory_nodes(tmp_path / "node", {0: "0-31", 1: "32-63"})
    places = place_ranks(list(range(64)), 64, root, nodes)
    assert places == RankPlaces(list(range(64)), (16, 16, 16, 16), (32, 32))
    assert places.node_cpus == [list(range(32)), list(range(32, 64))]
    assert [places.node_of(rank) for rank in (0, 31, 32, 63)] == [0, 0, 1, 1]


def test_cores_that_are_numbered_in_turns_are_put_together(tmp_path: Path) -> None:
    root = machine(tmp_path / "cpu", [n % 4 for n in range(16)], [n % 2 for n in range(16)])
    nodes = memory_nodes(tmp_path / "node", {0: "0,2,4,6,8,10,12,14", 1: "1,3,5,7,9,11,13,15"})
    places = place_ranks(list(range(16)), 16, root, nodes)
    assert places.nodes == (8, 8)
    assert places.clusters == (4, 4, 4, 4)
    assert places.cpus == [0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15]


def test_the_first_cores_are_used_whatever_their_node(tmp_path: Path) -> None:
    nodes = memory_nodes(tmp_path / "node", {0: "0,2,4,6", 1: "1,3,5,7"})
    places = place_ranks(list(range(8)), 5, tmp_path / "missing", nodes)
    assert places == RankPlaces([0, 2, 4, 1, 3, 5, 6, 7], (), (3, 2))
    assert place_ranks([0, 2, 1], 2, tmp_path / "missing", nodes) == RankPlaces([0, 2, 1]), "both of one node"


def test_one_node_and_ranks_that_are_not_pinned(tmp_path: Path) -> None:
    one = memory_nodes(tmp_path / "one", {0: "0-7"})
    two = memory_nodes(tmp_path / "two", {0: "0-3", 1: "4-7"})
    cpus = list(range(8))
    missing = tmp_path / "missing"
    for nodes, ranks in ((one, 8), (two, 9), (missing, 8)):
        places = place_ranks(cpus, ranks, missing, nodes)
        assert places == RankPlaces(cpus)
        assert places.node_cpus == []
        assert places.node_of(7) == 0


def test_a_node_that_two_sockets_share_makes_no_nodes(tmp_path: Path) -> None:
    cpus = list(range(16))
    root = machine(tmp_path / "cpu", [-1] * 16, [n % 4 // 2 for n in cpus])  # sockets 0, 0, 1, 1, 0, 0, ...
    nodes = memory_nodes(tmp_path / "node", {0: "0,2,4,6,8,10,12,14", 1: "1,3,5,7,9,11,13,15"})
    places = place_ranks(cpus, 16, root, nodes)
    assert sorted(places.cpus) == cpus
    assert (places.clusters, places.nodes) == ((8, 8), ())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_rank_has_the_node_whose_cpu_it_is_pinned_to(nodes: list[int]) -> None:
    places = RankPlaces(list(range(100, 100 + sum(nodes))), (), tuple(nodes))
    for rank in range(sum(nodes)):
        assert places.cpus[rank] in places.node_cpus[node_of(nodes, rank)]
