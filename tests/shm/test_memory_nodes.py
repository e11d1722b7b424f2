"""Memory is reserved beside the CPUs of emulated memory nodes.  Which node a page lies on is not tested."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm import memory_nodes
from shm.arena import HEADER_BYTES, Arena
from tests.emulated_machine import memory_nodes as folder_of

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(tmp_path / "a", "test", 1, 8 * MIB, {}, reserved=0)
    yield made
    made.close()


def blocks(arena: Arena) -> int:
    """Bytes that the file system has given to the arena's file."""
    return arena.path.stat().st_blocks * 512


def test_cpus_by_node(tmp_path: Path) -> None:
    root = folder_of(tmp_path, {0: "0-3,8", 10: "4-7", 2: "", 3: "9-10"})
    assert memory_nodes.of(range(11), root) == [[0, 1, 2, 3, 8], [9, 10], [4, 5, 6, 7]]
    assert memory_nodes.of([10, 4, 9, 4], root) == [[10, 9], [4]], "in the given order, each once"
    assert memory_nodes.of([1, 99], root) == [[1, 99]], "a CPU of no node is put to the first one"
    assert memory_nodes.of([], root) == []


def test_a_kernel_that_says_nothing_has_one_node(tmp_path: Path) -> None:
    assert memory_nodes.of([0, 5], tmp_path / "missing") == [[0, 5]]
    assert memory_nodes.of([0, 5], folder_of(tmp_path / "damaged", {0: "0-x"})) == [[0, 5]]


def test_the_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_NODES", str(folder_of(tmp_path, {0: "0", 1: "1"})))
    assert memory_nodes.of([1, 0]) == [[0], [1]]
    monkeypatch.delenv("STARLING_NODES")
    here = sorted(os.sched_getaffinity(0))
    assert sorted(cpu for node in memory_nodes.of(here) for cpu in node) == here


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 700), st.integers(1, 5), st.integers(0, 5000))
def test_nodes_take_turns_wherever_a_reservation_begins(
    begin: int, length: int, turn: int, n_nodes: int, between: int
) -> None:
    nodes = [[cpu] for cpu in range(n_nodes)]
    end, split = begin + length, min(begin + length, begin + 1 + between)
    for parts in (
        memory_nodes.in_turns(begin, end, nodes, turn),
        [
            *memory_nodes.in_turns(begin, split, nodes, turn),
            *(memory_nodes.in_turns(split, end, nodes, turn) if split < end else ()),
        ],
    ):
        ends = [at for at, _ in parts]
        assert ends == sorted(set(ends))
        assert ends[-1] == end
        at = begin
        for stop, cpus in parts:
            assert at < stop
            assert all(cpus == nodes[byte // turn % n_nodes] for byte in (at, stop - 1))
            assert at // turn == (stop - 1) // turn, "a part is of one turn"
            at = stop


def test_each_part_is_reserved_beside_its_node(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    nodes = [[cpus[0]], [cpus[-1]]]
    seen: list[tuple[int, set[int], int]] = []
    real = Arena.reserve

    def reserve(self: Arena, nbytes: int, huge: bool = False) -> bool:
        seen.append((nbytes, os.sched_getaffinity(0), threading.get_ident()))
        return real(self, nbytes, huge)

    monkeypatch.setattr(Arena, "reserve", reserve)
    memory_nodes.reserve(arena, memory_nodes.in_turns(0, 3 * MIB, nodes, MIB))
    assert [(end, allowed) for end, allowed, _ in seen] == [
        (MIB, {cpus[0]}),
        (2 * MIB, {cpus[-1]}),
        (3 * MIB, {cpus[0]}),
    ]
    assert threading.get_ident() not in {thread for *_, thread in seen}
    assert os.sched_getaffinity(0) == set(cpus), "this thread stays where it may run"
    assert arena.reserved == 3 * MIB
    assert HEADER_BYTES + 3 * MIB <= blocks(arena) < 4 * MIB


def test_cpus_that_are_forbidden_keep_no_memory_from_being_reserved(arena: Arena) -> None:
    memory_nodes.reserve(arena, [(64 * KIB, [1023])])
    assert arena.reserved == 64 * KIB


def test_a_reservation_that_fails_returns_what_it_had(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.reserve(64 * KIB)
    real = Arena.reserve

    def reserve(self: Arena, nbytes: int, huge: bool = False) -> bool:
        if nbytes > 2 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, nbytes, huge)

    monkeypatch.setattr(Arena, "reserve", reserve)
    parts = memory_nodes.in_turns(64 * KIB, 3 * MIB, [sorted(os.sched_getaffinity(0))], MIB)
    with pytest.raises(OSError, match="No space left"):
        memory_nodes.reserve(arena, parts)
    assert arena.reserved == 64 * KIB
    assert blocks(arena) < MIB
