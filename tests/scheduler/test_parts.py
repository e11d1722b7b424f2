"""The scheduler's parts one by one: cost, batch, leases, retry, speculation, ring, fence, admission."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from array import array

import numpy as np
import pytest

from pipeline.protocol.messages import Granted, KvReady, Sampling
from shm import step_ring as sh
from shm.arena import process_ticks
from shm.step_ring import DEFAULT_ORDER, StepsGeometry, blank_steps, pack_order
from stages.scheduler.core.leases import BadTableError, Leases
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.sequence import IllegalTransitionError, Sequence, State
from stages.scheduler.draft.prompt_lookup import LONGEST_SILENCE, Drafter
from stages.scheduler.policy.admission import Limits, malformed, misfit
from stages.scheduler.policy.batch import MIN_CHUNK, Budget, compose
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.queues import Tenant
from stages.scheduler.recovery.fencing import Fence
from stages.scheduler.recovery.quarantine import DEATH, STALL, alone, is_suspect, strike

from .peers import submission


def sequence(name: str = "a", n: int = 10, output: int = 20, tenant: Tenant | None = None) -> Sequence:
    frame = submission(name, [1] * n, output)
    return Sequence(frame, b"g", tenant or Tenant("t", 1.0), 0.0, int(name, 36))


def held(name: str, n: int, computed: int, output: int = 20, tenant: Tenant | None = None) -> Sequence:
    s = sequence(name, n, output, tenant)
    s.computed = s.planned = computed
    s.leased = 10_000
    return s


# ------------------------------------------------------------------ states


def test_only_legal_transitions():
    s = sequence()
    for state in (State.PREFILLING, State.DECODING, State.PENDING, State.PREFILLING, State.FAILED):
        s.move(state)
    for state in State:
        with pytest.raises(IllegalTransitionError, match="failed ->"):
            s.move(state)
    with pytest.raises(IllegalTransitionError):
        sequence().move(State.DECODING)


# ------------------------------------------------------------------ cost


def test_cost_is_learned_from_steps_and_shrugs_off_outliers():
    rng = random.Random(1)
    cost = CostModel()
    for _ in range(600):
        tokens = rng.choice([1, 4, 16, 16 + rng.randrange(100)])
        positions = tokens * rng.randrange(10, 2000)
        took = (1800 + 90 * tokens + 0.05 * positions) * rng.gauss(1, 0.03)
        cost.learn(tokens, positions, took * (30 if rng.random() < 0.01 else 1))
    for tokens, positions in ((1, 100), (16, 8000), (80, 40_000)):
        true = 1800 + 90 * tokens + 0.05 * positions
        assert cost.predict(tokens, positions) == pytest.approx(true, rel=0.15)


def test_cost_stays_positive_when_all_steps_are_alike():
    cost = CostModel()
    for _ in range(2000):
        cost.learn(1, 50, 900.0)
    assert cost.predict(1, 50) == pytest.approx(900, rel=0.05)
    assert min(cost.fixed_us, cost.token_us, cost.position_us) > 0


def test_a_chunk_costs_what_is_left_and_no_more():
    cost = CostModel(1000, 100, 0.5)
    for start in (0, 500, 4000):
        n = cost.chunk(10_000, start, 10_000)
        price = 100 * n + 0.5 * (n * start + n * n / 2)
        another = 100 + 0.5 * (start + n)
        assert 0.9 * 10_000 - another < price <= 10_000
    assert cost.chunk(-1, 0, 100) == 0
    assert cost.chunk(1e9, 0, 7) == 7


# ------------------------------------------------------------------ batch


def test_all_streams_compute_and_prompts_fill_the_budget():
    budget = Budget(max_entries=8, max_tokens=512, max_samples=72)
    cost = CostModel(2000, 200, 0.01)
    streams = [held(str(i), 10, 9) for i in range(4)]
    batch = compose([*streams, held("9", 1000, 0)], budget, cost)
    found = [(e.sequence.id, e.count, e.samples) for e in batch.entries[:4]]
    assert found == [(str(i), 1, 1) for i in range(4)]
    chunk = batch.entries[4]
    assert chunk.samples == 0
    assert cost.predict(batch.tokens, batch.positions) <= budget.margin * budget.gap_us * 1.01
    assert chunk.count % 16 == 0


def test_a_prompt_advances_whatever_the_budget_says():
    budget = Budget(max_entries=8, max_tokens=512, max_samples=72)
    expensive = CostModel(50_000, 20_000, 10)
    batch = compose([held("1", 10, 9), held("2", 1000, 0), held("3", 1000, 0)], budget, expensive)
    assert [(e.sequence.id, e.count) for e in batch.entries] == [("1", 1), ("2", MIN_CHUNK)]


def test_the_end_of_a_prompt_is_sampled_in_the_same_step():
    batch = compose([held("1", 40, 0)], Budget(4, 512, 68), CostModel(1000, 10, 0.01))
    assert [(e.start, e.count, e.samples) for e in batch.entries] == [(0, 40, 1)]


def test_a_short_prompt_of_a_quiet_tenant_is_a_step_of_its_own_every_other_step():
    quiet, flood = Tenant("quiet", 1.0), Tenant("flood", 1.0)
    flood.served = 10_000.0
    streams = [held(str(i), 10, 9, tenant=flood) for i in range(4)]
    budget, cost = Budget(max_entries=8, max_tokens=512, max_samples=72), CostModel(2000, 200, 0.01)

    def found(prompt: int, may_stall: bool = True, tenant: Tenant = quiet) -> list[tuple[str, int]]:
        batch = compose([*streams, held("9", prompt, 0, tenant=tenant)], budget, cost, None, may_stall)
        assert batch.stalls == (len(batch.entries) == 1)
        assert batch.tokens == sum(entry.count for entry in batch.entries)
        if batch.stalls:
            assert batch.left == [flood]
            assert cost.predict(batch.tokens, batch.positions) <= budget.quiet_us
            assert batch.entries[0].samples == 1
        return [(entry.sequence.id, entry.count) for entry in batch.entries]

    assert found(100) == [("9", 100)]
    assert len(found(100, may_stall=False)) == 5
    assert len(found(200)) == 5, "takes more than such a step may"
    assert len(found(100, tenant=flood)) == 5


def test_nothing_beyond_pages_the_last_token_or_a_verification():
    done, dry, verifying, chunk = held("1", 10, 9, 1), held("2", 10, 9), held("3", 10, 9), held("4", 100, 0)
    done.ahead = 1
    dry.leased = 9
    verifying.drafts = (1, 2)
    chunk.leased = 32
    batch = compose([done, dry, verifying, chunk], Budget(8, 512, 72), CostModel(1000, 10, 0.01))
    assert [(e.sequence.id, e.count, e.samples) for e in batch.entries] == [("4", 32, 0)]


def test_places_go_to_the_tenant_that_has_had_least():
    a, b = Tenant("a", 1.0), Tenant("b", 1.0)
    a.served = 100.0
    streams = [held(str(i), 10, 9, tenant=a if i < 4 else b) for i in range(8)]
    batch = compose(streams, Budget(5, 512, 72), CostModel())
    assert [e.sequence.id for e in batch.entries] == ["4", "5", "6", "7", "0"]
    assert batch.left == [a]


# ------------------------------------------------------------------ leases


def leased(pages: int = 8) -> tuple[Leases, Sequence]:
    leases = Leases("m")
    leases.up(KvReady("m", "", "", pages, 16, 1), [])
    s = sequence(n=20)
    s.row = 0
    leases.acquire(s)
    return leases, s


@pytest.mark.parametrize(
    ("pages", "cached", "reason"),
    [
        ((0, 8), 0, "outside"),
        ((0, -1), 0, "outside"),
        ((3, 3), 0, "twice"),
        ((1, 2), 20, "cached"),
        ((1, 2), -1, "cached"),
        ((1,), 17, "cached"),
    ],
)
def test_a_table_that_would_harm_is_refused(pages, cached, reason):
    leases, s = leased()
    with pytest.raises(BadTableError, match=reason):
        leases.take(s, Granted(1, "a", pages, cached))
    assert s.pages == ()


def test_pages_in_use_never_change():
    leases, s = leased()
    leases.take(s, Granted(1, "a", (1, 2)))
    with pytest.raises(BadTableError, match="replaced"):
        leases.take(s, Granted(2, "a", (2, 1, 3)))
    leases.take(s, Granted(2, "a", (1, 2, 3)))
    assert s.leased == 48


def test_an_answer_nobody_waits_for_is_ignored():
    leases, s = leased()
    leases.release(s)
    assert leases.answered(1) is None
    assert leases.unanswered == 0


# ------------------------------------------------------------------ retry


def test_strikes_single_out_the_culprit():
    a, b, c = members = [held(name, 10, 9) for name in "abc"]
    for _ in range(3):
        assert alone(members) is None
        assert strike(members, DEATH) is None
    assert all(is_suspect(s) for s in members)
    assert alone(members) is a
    a.strikes = 0  # its step went well
    assert alone(members) is b
    assert strike([b], DEATH) is b
    b.is_over = True
    assert alone(members) is c


@pytest.mark.parametrize(("strikes", "most"), [(DEATH, 4), (STALL, 2)])
def test_a_step_of_one_needs_no_separation(strikes, most):
    a = held("a", 10, 9)
    for _ in range(most - 1):
        assert strike([a], strikes) is None
    assert strike([a], strikes) is a


def test_a_third_stall_convicts_one_of_many():
    a, b = members = [held(name, 10, 9) for name in "ab"]
    assert strike(members, STALL) is None
    assert strike(members, STALL) is None
    assert alone(members) is a
    assert strike([a], STALL) is a
    assert not is_suspect(held("c", 10, 9))
    assert alone([b]) is b


# ------------------------------------------------------------------ speculation


def test_drafts_are_what_followed_last_time():
    drafter = Drafter(8)
    tokens = array("i", [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3])
    assert drafter.draft(tokens, 8) == (4, 5, 6, 7)
    assert drafter.draft(tokens, 2) == (4, 5)
    drafter.result(15, 4, 4)
    assert drafter.length == 8
    assert Drafter(8).draft(array("i", [1, 2]), 8) == ()


def test_failure_buys_silence_that_grows_and_success_ends_it():
    drafter = Drafter(8)
    tokens = array("i", [1, 2, 3] * 4)
    silences = []
    for _ in range(12):
        assert drafter.draft(tokens, 8)
        n = len(tokens)
        drafter.result(n, 4, 0)
        while not drafter.draft(tokens, 8):
            tokens.append(tokens[len(tokens) - 3])
        silences.append(len(tokens) - n)
    assert silences == sorted(silences)
    assert silences[-1] == LONGEST_SILENCE
    drafter.result(len(tokens), 4, 2)
    assert drafter.draft(tokens, 8)


def test_holding_back_in_vain_counts_as_a_failure():
    drafter = Drafter(8)
    tokens = array("i", [1, 2, 3, 4, 1, 2, 3])
    assert drafter.awaits(tokens)
    tokens.append(9)
    assert drafter.draft(tokens, 8) == ()
    assert not drafter.awaits(array("i", [*tokens, 1]))


# ------------------------------------------------------------------ ring


GEOMETRY = StepsGeometry(max_rows=3, max_entries=2, max_samples=10, max_tokens=64, max_pages=5)


def ring() -> tuple[Ring, sh.Steps]:
    steps = blank_steps(GEOMETRY)
    made = Ring(steps, GEOMETRY, 1000)
    made.start(7)
    return made, steps


def test_a_row_says_all_that_a_sequence_asked_for():
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
    assert r.publish([(2, 0, 9, 1), (0, 5, 4, 4)]) == 1
    assert steps.control[sh.HEAD] == 1
    assert steps.slot_head[1, :4].tolist() == [1, 7, 2, 5]
    assert steps.entries[1, 0, :5].tolist() == [2, 0, 9, 1, 0]
    assert steps.entries[1, 1, :5].tolist() == [0, 5, 4, 4, 1]
    for number in range(2, 20):
        assert r.publish([(0, number, 1, 1)]) == number
        assert steps.entries[number % sh.SLOTS, 0, sh.START] == number
    steps.out_token[19 % sh.SLOTS, :3] = [4, 5, 6]
    assert list(r.outputs(19, 3)) == [4, 5, 6]


def test_a_row_holds_a_context_and_the_token_after_it():
    r, steps = ring()
    r.write_tokens(0, 64, array("i", [1]))
    assert steps.tokens[0, 64] == 1
    with pytest.raises(ValueError, match="holds 65 tokens"):
        r.write_tokens(0, 64, array("i", [1, 2]))


def test_starting_afresh_forgets_what_was_not_done():
    r, steps = ring()
    for _ in range(3):
        r.publish([(0, 0, 1, 1)])
    steps.control[sh.DONE] = 1
    assert r.start(8) == 2
    assert steps.control[sh.HEAD] == 1
    assert steps.control[sh.GENERATION] == 8


def test_the_order_of_the_sampler_packs_four_bits_a_step():
    assert pack_order(()) == pack_order(DEFAULT_ORDER) == 0x654321
    with pytest.raises(KeyError):
        pack_order(("mask", "nonsense"))


# ------------------------------------------------------------------ admission


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_ids": tuple(range(40))}, "stop_token_ids"),
        ({"sampling": Sampling(logit_bias=tuple((i, 1.0) for i in range(301)))}, "logit_bias"),
        ({"sampling": Sampling(logprobs=21)}, "logprobs"),
        ({"sampling": Sampling(order=("mask", "mask"))}, "order"),
        ({"sampling": Sampling(order=("magic",))}, "order"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": b"abc"}, "prompt"),
        ({"forced": b"abc"}, "forced"),
    ],
)
def test_malformed_submissions_name_the_field(fields, param):
    from msgspec.structs import replace

    refusal = malformed(replace(submission("a", [1], 5), **fields))
    assert refusal is not None
    assert (refusal.code, refusal.param) == ("INVALID_REQUEST", param)
    assert malformed(submission("a", [1], 5)) is None


def test_ids_outside_the_vocabulary_never_reach_a_row():
    limits = Limits(vocab_size=100)
    s = sequence()
    assert misfit(s, limits) is None
    s.stop_ids = frozenset({100})
    assert "stop_token_ids" in str(misfit(s, limits))
    s.stop_ids = frozenset()
    s.sampling = Sampling(logit_bias=((-1, 1.0),))
    assert "logit_bias" in str(misfit(s, limits))


# ------------------------------------------------------------------ fence


def test_a_fence_kills_whom_it_names_and_nobody_else():
    wait = "import signal; print(flush=True); signal.pause()"
    victim, bystander = (subprocess.Popen([sys.executable, "-c", wait], stdout=-1) for _ in range(2))
    for process in (victim, bystander):
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    # The bystander's pid with another start time: a process that had its pid before.
    old = (bystander.pid, process_ticks(bystander.pid) - 1)
    fence = Fence(((victim.pid, process_ticks(victim.pid)), old, (2**22 + 1, 5)))
    assert fence.wait(5.0)
    assert victim.wait() == -signal.SIGKILL
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
