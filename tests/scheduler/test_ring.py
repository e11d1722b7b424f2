"""The step ring as the scheduler writes and reads it."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from pipeline.protocol.messages import Sampling
from shm import step_ring as sh
from shm.step_ring import DEFAULT_ORDER, StepsGeometry, blank_steps, pack_order
from stages.scheduler.core.ring import Ring

GEOMETRY = StepsGeometry(max_rows=3, max_entries=2, max_samples=10, max_tokens=64, max_pages=5)


def ring() -> tuple[Ring, sh.Steps]:
    steps = blank_steps(GEOMETRY)
    made = Ring(steps, GEOMETRY, 1000)
    made.start(7)
    return made, steps


def test_a_row_contains_all_parameters_of_a_sequence():
    r, steps = ring()
    sampling = Sampling(
        seed=(1 << 64) - 2,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logprobs=3,
        min_tokens=4,
        ignore_eos=True,
        order=("top_p", "temperature"),
        logit_bias=((5, 1.5), (9, -100.0)),
    )
    r.write_row(1, array("i", [10, 11, 12]), 2, sampling, 6, (30, 20))
    ints = steps.row_ints[1]
    assert np.uint64(ints[sh.SEED].view(np.uint64)) == np.uint64((1 << 64) - 2)
    numbers = [sh.CHOICE, sh.OUTPUT_START, sh.TOP_K, sh.LOGPROBS, sh.MIN_TOKENS, sh.IGNORE_EOS]
    assert ints[numbers].tolist() == [6, 2, 7, 3, 4, 1]
    assert ints[[sh.N_BIAS, sh.N_MASK, sh.ORDER, sh.SERIAL]].tolist() == [2, 2, 0x35, 1001]
    floats = np.float32([0.5, 0.9, 1.1, 0.25, -0.5])
    assert (steps.row_floats[1, :5] == floats).all()
    assert steps.tokens[1, :3].tolist() == [10, 11, 12]
    assert steps.mask_ids[1, :2].tolist() == [20, 30]
    assert steps.bias_ids[1, :2].tolist() == [5, 9]
    assert steps.bias[1, :2].tolist() == [1.5, -100.0]
    assert not steps.tokens[0].any()
    assert not steps.tokens[2].any()


def test_a_published_step_reads_back_and_the_next_one_takes_the_next_slot():
    r, steps = ring()
    assert r.publish([(2, 0, 9, 1, 0), (0, 5, 4, 4, 7)]) == 1
    assert steps.control[sh.HEAD] == 1
    assert steps.slot_head[1, :4].tolist() == [1, 7, 2, 5]
    assert steps.entries[1, 0, :5].tolist() == [2, 0, 9, 1, 0]
    assert steps.entries[1, 1, :5].tolist() == [0, 5, 4, 4, 1]
    for number in range(2, 20):
        assert r.publish([(0, number, 1, 1, 0)]) == number
        assert steps.entries[number % sh.SLOTS, 0, sh.START] == number
    steps.out_token[19 % sh.SLOTS, :3] = [4, 5, 6]
    assert list(r.outputs(19, 3)) == [4, 5, 6]


def test_a_row_holds_a_context_and_the_token_after_it():
    r, steps = ring()
    r.write_tokens(0, 64, array("i", [1]))
    assert steps.tokens[0, 64] == 1
    with pytest.raises(ValueError, match="holds 65 tokens"):
        r.write_tokens(0, 64, array("i", [1, 2]))


def test_a_new_start_forgets_unacknowledged_steps():
    r, steps = ring()
    for _ in range(3):
        r.publish([(0, 0, 1, 1, 0)])
    steps.control[sh.DONE] = 1
    assert r.start(8) == 2
    assert steps.control[sh.HEAD] == 1
    assert steps.control[sh.GENERATION] == 8


def test_the_order_of_the_sampler_packs_four_bits_a_step():
    assert pack_order(()) == pack_order(DEFAULT_ORDER) == 0x6BA59483721
    with pytest.raises(KeyError):
        pack_order(("mask", "nonsense"))
