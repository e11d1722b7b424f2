"""The prediction of steps on more cores: known answers, and what must hold for any machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.checkpoint import Hyper, Tensor
from tools.bench.cores.model import Machine, Phase, Step, phases, predict, share

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


@given(st.integers(2, 127))
def test_lines_of_another_socket_take_longer(n: int) -> None:
    more = FAST.wait_s(n + 1) - FAST.wait_s(n)
    assert more == pytest.approx(FAST.line_s if n < FAST.socket_cores else FAST.remote_line_s)
