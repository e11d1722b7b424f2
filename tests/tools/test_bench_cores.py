"""The prediction of steps on more cores: known answers, and what must hold for any machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.checkpoint import Hyper, Tensor
from stages.worker.rank_clusters import MIN_RANKS
from tools.bench.cores.model import (
    Machine,
    Phase,
    SocketBarriers,
    Step,
    bandwidth,
    phases,
    predict,
    share,
    socket_barriers,
)

HYPER = Hyper(2, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, 64, "neighbours", "silu")
TENSORS = [
    Tensor(f"blk.{layer}.{name}.weight", 16, 32, "Q8_0", "groups", 0, nbytes, "")
    for layer in range(2)
    for name, nbytes in [("attn_q", 10), ("attn_k", 4), ("attn_v", 4), ("attn_output", 10), ("ffn_down", 40)]
]
EMBEDDING = Tensor("token_embd.weight", 16, 32, "Q8_0", "groups", 0, 900, "")
FAST = Machine(1e12, 1e15, 1.0, 1e-6, 1e-7, 3e-7, 64)
seconds = st.floats(1e-6, 1.0)


def test_units_and_bytes_are_those_of_the_model() -> None:
    found = phases(Step("", 16, 1, 600), HYPER, [*TENSORS, EMBEDDING])
    assert found["qkv"] == Phase(3 * 64 // 16, 2 * (10 + 4 + 4))
    assert found["down"] == Phase(576 // 16, 80)
    assert found["head"] == Phase(49152 // 16, 900)
    assert found["norm"].units == 16
    assert found["attention"] == Phase(16 * 3 * 3, 16 * 600 * 2 * 2 * 2 * 3 * 64)  # 601 positions: three KV splits
    assert phases(Step("", 1, 1, 600), HYPER, TENSORS)["norm"].units == 1  # each rank computes it
    assert phases(Step("", 1, 512, 0), HYPER, TENSORS)["attention"].units == 512 * 3


@pytest.mark.parametrize(("units", "n", "expected"), [(36, 2, 0.5), (36, 128, 1 / 36), (3, 2, 2 / 3), (1, 64, 1.0)])
def test_the_rank_with_most_work_decides(units: int, n: int, expected: float) -> None:
    assert share(units, n) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "gb_s"), [(1, 10), (16, 160), (17, 164), (64, 164), (65, 328), (128, 328)])
def test_cores_read_what_their_sockets_have(n: int, gb_s: float) -> None:
    assert bandwidth(n, 10.0, 164.0, 64) == gb_s


def test_known_answer() -> None:
    """A phase of 8 s in 4 units, one of 1 s that is not shared, 30 bytes at 10 a second, two barriers on 4 cores."""
    machine = Machine(10.0, 20.0, 1.5, 0.25, 0.125, 1.0, 3)
    one = {"down": 8.0, "norm": 1.0, "head": 0.5}
    made_of = {"down": Phase(4, 0), "norm": Phase(1, 0), "head": Phase(4, 30)}
    assert predict(one, made_of, 2, machine, 4) == pytest.approx(8 * 1.5 / 4 + 1.5 + 30 / 20 + 2 * (0.25 + 0.125 + 1))


@given(st.dictionaries(st.sampled_from(["qkv", "down", "other"]), seconds, min_size=1), st.integers(1, 4096))
def test_one_core_takes_what_was_measured(one: dict[str, float], units: int) -> None:
    made_of = {"qkv": Phase(units, 0), "down": Phase(units, 0)}
    assert predict(one, made_of, 100, FAST, 1) == pytest.approx(sum(one.values()))


@given(seconds, st.integers(1, 4096), st.integers(1, 127))
def test_without_barriers_more_cores_are_never_slower(alone: float, units: int, n: int) -> None:
    made_of = {"down": Phase(units, 0)}
    assert predict({"down": alone}, made_of, 0, FAST, n + 1) <= predict({"down": alone}, made_of, 0, FAST, n) + 1e-12


@pytest.mark.parametrize("n", range(2, MIN_RANKS - 1))
def test_lines_of_another_socket_take_longer(n: int) -> None:
    machine = FAST._replace(socket_cores=4)
    more = machine.wait_s(n + 1) - machine.wait_s(n)
    assert more == pytest.approx(machine.line_s if n < machine.socket_cores else machine.remote_line_s)


@pytest.mark.parametrize(
    ("socket_cores", "n", "barriers", "lines", "remote"),
    [
        (16, 16, 1, 14, 0),  # one socket, no clusters
        (4, 8, 2, 2 - 1, 1),  # two clusters of 4: rank 0 reads 3 lines, then one of the other socket
        (8, 12, 2, 6 - 1, 1),  # of 8 and 4: the larger one decides
        (16, 64, 2, 14 - 1, 3),
        (64, 64, 2, 14 + 2, 0),  # one socket, four clusters of 16
        (64, 128, 2, 14 + 2, 4),  # and four of another one
        (2, 16, 1, 0, 14),  # sockets are too small for clusters
    ],
)
def test_ranks_wait_in_the_clusters_that_the_worker_makes(
    socket_cores: int, n: int, barriers: int, lines: int, remote: int
) -> None:
    machine = Machine(1.0, 1.0, 1.0, 1e6, 1e3, 1.0, socket_cores)
    assert machine.wait_s(n) == pytest.approx(barriers * 1e6 + lines * 1e3 + remote, abs=0.5)


@given(st.integers(1, 128), st.integers(1, 64))
def test_a_barrier_takes_longer_where_the_lines_are_remote(n: int, socket_cores: int) -> None:
    machine = FAST._replace(socket_cores=socket_cores)
    assert 0 <= machine._replace(remote_line_s=machine.line_s).wait_s(n) <= machine.wait_s(n)
    assert (machine.wait_s(n) == 0) == (n == 1)


def test_what_changes_on_several_sockets() -> None:
    assert socket_barriers(Step("", 1, 4, 600), HYPER) == SocketBarriers(0, 0)
    assert socket_barriers(Step("", 8, 1, 600), HYPER) == SocketBarriers(2 * 2 + 1, 2)  # 8 rows of 48 records
    assert socket_barriers(Step("", 1, 512, 0), HYPER) == SocketBarriers(2 * 2, 2 * 2)
    assert phases(Step("", 16, 1, 600), HYPER, TENSORS)["norm"] == Phase(16, 0, True)
    machine = Machine(10.0, 20.0, 1.0, 0.25, 0.125, 1.0, 2)
    made_of = {"norm": Phase(8, 0, True)}
    apart = predict({"norm": 8.0}, made_of, 5, machine, 4, SocketBarriers(2, 3))
    assert apart == pytest.approx(8 / 2 + (5 - 2) * (0.25 + 2) + (2 + 3) * 0.25)
    together = predict({"norm": 8.0}, made_of, 5, machine._replace(socket_cores=4), 4, SocketBarriers(2, 3))
    assert together == pytest.approx(8 / 4 + 5 * (0.25 + 2 * 0.125))
    assert FAST._replace(socket_cores=16).wait_nearby_s(32) == pytest.approx(FAST.wait_s(16))
    assert FAST._replace(socket_cores=17).wait_nearby_s(34) == FAST._replace(socket_cores=17).wait_s(34)
