"""Batch composition: entries of one step under its budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.scheduler.core.pooled_prompt import PooledPrompt
from stages.scheduler.policy.batch import MIN_CHUNK, MIN_PROMPT_CHUNK, Budget, compose, whole_grains
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.tenant import Tenant

from .builders import scheduled


def test_all_streams_compute_and_prompts_fill_the_budget():
    budget = Budget(max_entries=8, max_tokens=512, max_samples=72)
    cost = CostModel(2000, 200, 0.01)
    streams = [scheduled(str(i), 10, 9) for i in range(4)]
    batch = compose([*streams, scheduled("9", 1000, 0)], budget, cost)
    found = [(e.sequence.id, e.count, e.samples) for e in batch.entries[:4]]
    assert found == [(str(i), 1, 1) for i in range(4)]
    chunk = batch.entries[4]
    assert chunk.samples == 0
    pacing = budget.pacing
    bound_us = pacing.margin * pacing.gap_factor * 1e6 * pacing.wake_s
    assert cost.predict(batch.tokens, batch.positions) <= 1.01 * bound_us
    assert chunk.count % 4 == 0


def test_chunks_are_whole_tiles_if_little_is_lost():
    assert [whole_grains(n) for n in (1, 15, 16, 31, 63, 64, 127)] == [1, 15, 16, 28, 60, 64, 112]


def test_a_prompt_advances_whatever_the_budget_says():
    budget = Budget(max_entries=8, max_tokens=512, max_samples=72)
    expensive = CostModel(50_000, 600_000, 10)
    batch = compose([scheduled("1", 10, 9), scheduled("2", 1000, 0), scheduled("3", 1000, 0)], budget, expensive)
    assert [(e.sequence.id, e.count) for e in batch.entries] == [("1", 1), ("2", MIN_PROMPT_CHUNK)]
    batch = compose([scheduled("2", 1000, 0), scheduled("3", 1000, 0)], budget, expensive)
    assert [(e.sequence.id, e.count) for e in batch.entries] == [("2", MIN_PROMPT_CHUNK)]


def test_behind_many_positions_a_chunk_gets_smaller_until_the_streams_gaps_are_kept():
    budget = Budget(max_entries=8, max_tokens=512, max_samples=72)
    cost = CostModel(50_000, 3300, 0.65)  # a model of 1 billion parameters on two cores
    stream = scheduled("1", 20, 19)
    bound_us = budget.pacing.gap_factor * cost.predict(1, 20)
    counts = []
    for computed in (0, 4000, 8000, 32_000, 60_000):
        prompt = scheduled("2", 70_000, computed)
        prompt.run.leased = 70_000
        batch = compose([stream, prompt], budget, cost)
        counts.append(batch.entries[1].count)
        is_kept = cost.predict(batch.tokens, batch.positions) <= bound_us
        assert is_kept == (computed < 60_000)
    assert counts[0] > counts[1] > counts[2] > counts[3] == MIN_CHUNK
    # No chunk that is worth its step keeps them: the prompt advances.
    assert counts[4] == MIN_PROMPT_CHUNK


def test_several_waiting_prompts_may_make_gaps_longer():
    budget, cost, usual_us, longest_us = _crowd_bounds()
    mine = Tenant("mine", 1.0)

    def step_us(streams: int, prompts: int) -> float:
        return _step_us(budget, cost, [mine] * streams, [mine] * prompts)

    grain_us = 4 * cost.token_us
    assert usual_us - grain_us <= step_us(8, 1) <= usual_us
    assert longest_us - grain_us <= step_us(8, 2) <= longest_us
    assert longest_us - grain_us <= step_us(8, 8) <= longest_us
    between_us = usual_us + (longest_us - usual_us) * budget.pacing.crowd_streams / 12
    assert between_us - grain_us <= step_us(12, 2) <= between_us < longest_us


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_no_prompt_makes_the_gaps_of_another_tenants_streams_longer(streams: list[int], prompts: list[int]):
    """Only where each tenant with a stream has several prompts of its own is a step longer than usual."""
    budget, cost, usual_us, longest_us = _crowd_bounds()
    tenants = [Tenant(str(i), 1.0 + i) for i in range(4)]
    found_us = _step_us(budget, cost, [tenants[i] for i in streams], [tenants[i] for i in prompts])
    has_own = all(prompts.count(i) >= 2 for i in streams)
    assert found_us <= (longest_us if has_own else usual_us)


def test_embeddings_do_not_make_gaps_longer():
    budget, cost, usual_us, _ = _crowd_bounds()
    mine = Tenant("mine", 1.0)
    running = [scheduled(str(i), 10, 9, tenant=mine) for i in range(4)]
    embedded = [scheduled(str(20 + i), 300, 0, tenant=mine) for i in range(6)]
    for sequence in embedded:
        sequence.pooled = PooledPrompt("mean", 300)
    batch = compose([*running, *embedded], budget, cost)
    assert cost.predict(batch.tokens, batch.positions) <= usual_us


def _crowd_bounds() -> tuple[Budget, CostModel, float, float]:
    """A budget, a cost model whose predictions are exact, and the usual and the longest time of a step."""
    budget, cost = Budget(max_entries=16, max_tokens=512, max_samples=80), CostModel(3000, 900, 0.01)
    cost.alone.p99 = cost.beside.p99 = 1.0
    pacing = budget.pacing
    usual_us = pacing.margin * pacing.gap_factor * 1e6 * pacing.wake_s
    return budget, cost, usual_us, pacing.crowd_factor * usual_us


def _step_us(budget: Budget, cost: CostModel, streams: list[Tenant], prompts: list[Tenant]) -> float:
    """Predicted time of a step with a running stream and a waiting prompt of each of these tenants."""
    running = [scheduled(str(i), 10, 9, tenant=tenant) for i, tenant in enumerate(streams)]
    waiting = [scheduled(str(20 + i), 300, 0, tenant=tenant) for i, tenant in enumerate(prompts)]
    batch = compose([*running, *waiting], budget, cost)
    return cost.predict(batch.tokens, batch.positions)


def test_a_step_without_streams_is_worth_reading_the_weights():
    """Where they take longer than an arriving request should wait, most of a step is still prompt tokens."""
    budget = Budget(max_entries=8, max_tokens=512, max_samples=72)
    cost = CostModel(200_000, 1000, 0.01)
    batch = compose([scheduled("1", 10_000, 0)], budget, cost)
    assert 0.7 <= cost.token_us * batch.tokens / cost.predict(batch.tokens, batch.positions) <= 0.8


def test_the_end_of_a_prompt_is_sampled_in_the_same_step():
    batch = compose([scheduled("1", 40, 0)], Budget(4, 512, 68), CostModel(1000, 10, 0.01))
    assert [(e.start, e.count, e.samples) for e in batch.entries] == [(0, 40, 1)]


def test_a_short_prompt_of_a_quiet_tenant_is_a_step_of_its_own_every_other_step():
    quiet, flood = Tenant("quiet", 1.0), Tenant("flood", 1.0)
    flood.served = 10_000.0
    streams = [scheduled(str(i), 10, 9, tenant=flood) for i in range(4)]
    budget, cost = Budget(max_entries=8, max_tokens=512, max_samples=72), CostModel(2000, 200, 0.01)

    def found(prompt: int, may_pause_streams: bool = True, tenant: Tenant = quiet) -> list[tuple[str, int]]:
        batch = compose([*streams, scheduled("9", prompt, 0, tenant=tenant)], budget, cost, None, may_pause_streams)
        assert batch.pauses_streams == (len(batch.entries) == 1)
        assert batch.tokens == sum(entry.count for entry in batch.entries)
        if batch.pauses_streams:
            assert batch.unscheduled == [flood]
            assert cost.predict(batch.tokens, batch.positions) <= budget.pacing.quiet_us
            assert batch.entries[0].samples == 1
        return [(entry.sequence.id, entry.count) for entry in batch.entries]

    assert found(100) == [("9", 100)]
    assert len(found(100, may_pause_streams=False)) == 5
    assert len(found(200)) == 5, "it takes more time than such a step may"
    assert len(found(100, tenant=flood)) == 5


def test_no_position_beyond_pages_the_last_token_or_a_verification():
    done, dry, verifying, chunk = (
        scheduled("1", 10, 9, 1),
        scheduled("2", 10, 9),
        scheduled("3", 10, 9),
        scheduled("4", 100, 0),
    )
    done.run.ahead = 1
    dry.run.leased = 9
    verifying.draft_tokens = (1, 2)
    chunk.run.leased = 32
    batch = compose([done, dry, verifying, chunk], Budget(8, 512, 72), CostModel(1000, 10, 0.01))
    assert [(e.sequence.id, e.count, e.samples) for e in batch.entries] == [("4", 32, 0)]


def test_places_go_to_the_least_served_tenant():
    a, b = Tenant("a", 1.0), Tenant("b", 1.0)
    a.served = 100.0
    streams = [scheduled(str(i), 10, 9, tenant=a if i < 4 else b) for i in range(8)]
    batch = compose(streams, Budget(5, 512, 72), CostModel())
    assert [e.sequence.id for e in batch.entries] == ["4", "5", "6", "7", "0"]
    assert batch.unscheduled == [a]


def test_several_prompts_fill_a_step_where_no_stream_runs():
    """Up to its tokens, or to the time that a request which arrives may wait for it."""
    budget = Budget(max_entries=8, max_tokens=512, max_samples=72)
    prompts = [scheduled(str(i), 100, 0) for i in range(8)]

    def found(token_us: float) -> list[tuple[str, int, int]]:
        batch = compose(prompts, budget, CostModel(2000, token_us, 0.01))
        return [(entry.sequence.id, entry.count, entry.samples) for entry in batch.entries]

    assert found(100) == [*((str(i), 100, 1) for i in range(5)), ("5", 12, 0)]
    assert found(200) == [("0", 100, 1), ("1", 100, 1), ("2", 80, 0)]
