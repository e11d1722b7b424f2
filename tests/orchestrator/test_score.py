"""The score: terms in seconds, each in its direction."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet.bodies import Progress
from stages.orchestrator.rates import MOST_CHANGE, EngineRates, Mean, Rates
from stages.orchestrator.score import Residence, Terms, Weights, residence, shared_files, terms, version_of
from tests.orchestrator.agents import DIGEST, MODEL, PUBLISHED, cached, engine, heartbeat

NBYTES = PUBLISHED[MODEL].nbytes
SECONDS = st.floats(0, 1000)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.builds(Weights, *[st.floats(0, 10)] * 4))
def test_the_score_is_the_weighted_sum(a: float, b: float, c: float, d: float, weights: Weights) -> None:
    found = Terms(cache_level_s=a, kv_hit_s=b, queue_s=c, transfer_s=d).total(weights)
    alpha, beta, gamma, delta = weights
    assert math.isclose(found, alpha * a - beta * b + gamma * c + delta * d, abs_tol=1e-6)


def test_levels_are_ordered_by_time() -> None:
    rates = EngineRates()

    def estimate(where: Residence) -> float:
        return terms(heartbeat("a"), where, rates, ahead=0, matched_bytes=0).total(Weights())

    resident = residence(heartbeat("a", engine()), MODEL, DIGEST, NBYTES)
    dram = residence(heartbeat("a", cached_models=(cached(cache_level="DRAM_CACHED"),)), MODEL, DIGEST, NBYTES)
    nvme = residence(heartbeat("a", cached_models=(cached(names=("alias",)),)), MODEL, DIGEST, NBYTES)
    partial = residence(
        heartbeat("a", cached_models=(cached(is_complete=False, bytes=NBYTES // 2),)), MODEL, DIGEST, NBYTES
    )
    peer = residence(heartbeat("a", shares_pieces=True), MODEL, DIGEST, int(1.5 * NBYTES), {"b"})
    remote = residence(heartbeat("a"), MODEL, DIGEST, NBYTES)
    assert [one.missing for one in (resident, dram, nvme, partial, remote)] == [0, 0, 0, NBYTES // 2, NBYTES]
    estimates = [estimate(one) for one in (resident, dram, nvme, partial, peer, remote)]
    assert estimates == sorted(estimates)
    assert estimates[0] == 0 and len(set(estimates)) == 6


def test_a_peers_cache_is_one_of_another_agent_that_shares() -> None:
    def level(holders: set[str], **fields: bool) -> str:
        return residence(heartbeat("a", **fields), MODEL, DIGEST, NBYTES, holders).level

    assert level({"a", "b"}, shares_pieces=True) == "PEER_CACHED"
    assert level({"a"}, shares_pieces=True) == "REMOTE"
    assert level({"b"}) == "REMOTE"  # an agent of an older release gets nothing from others
    shown = heartbeat("b", cached_models=(cached(), cached("other", is_complete=False)), shares_pieces=True)
    assert shared_files(shown) == [DIGEST]
    assert shared_files(heartbeat("b", cached_models=(cached(),))) == []


def test_a_model_that_is_loading_is_not_resident() -> None:
    loading = heartbeat("a", engine(model_state="DOWNLOADING", cache_level="REMOTE"))
    assert residence(loading, MODEL, DIGEST, NBYTES) == Residence("REMOTE", NBYTES, NBYTES)


def test_a_model_that_is_ready_and_still_arrives_counts_the_rest_of_its_download() -> None:
    progress = Progress(phase="download", done=NBYTES // 4, total=NBYTES)
    arriving = heartbeat("a", engine(cache_level="REMOTE", progress=progress))
    where = residence(arriving, MODEL, DIGEST, NBYTES)
    assert where == Residence("REMOTE", where.nbytes, NBYTES - NBYTES // 4)
    resident = residence(heartbeat("a", engine()), MODEL, DIGEST, NBYTES)
    assert resident.missing == 0

    def estimate(one: Residence) -> float:
        return terms(arriving, one, EngineRates(), ahead=0, matched_bytes=0).total(Weights())

    assert estimate(where) > estimate(resident)


def test_transfer_uses_the_measured_bandwidth() -> None:
    where = Residence("REMOTE", NBYTES, NBYTES)
    fast = terms(heartbeat("a", download_bytes_per_s=1e9), where, EngineRates(), ahead=0, matched_bytes=0)
    assert fast.transfer_s == NBYTES / 1e9
    # What is cached counts only where an engine holds it.
    assert terms(heartbeat("a"), where, EngineRates(), ahead=0, matched_bytes=1000).kv_hit_s == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_no_sample_moves_a_mean_far(samples: list[float]) -> None:
    mean = Mean(1.0)
    for sample in samples:
        before = mean.value
        mean.add(sample)
        assert before / MOST_CHANGE <= mean.value <= before * MOST_CHANGE
    assert mean.count == len(samples)


def test_rates_follow_what_happens() -> None:
    rates = Rates()
    for _ in range(100):
        rates.observe("a", MODEL, new_bytes=10_000, ahead=0, first_token_s=1.0, predicted_s=5.0)
    assert math.isclose(rates.of("a", MODEL).prefill_s_per_byte.value, 1e-4, rel_tol=0.01)
    for _ in range(100):
        rates.observe("a", MODEL, new_bytes=10_000, ahead=4, first_token_s=3.0, predicted_s=1.0)
    assert math.isclose(rates.of("a", MODEL).turn_s.value, 0.5, rel_tol=0.05)
    assert rates.errors().count == 200 and math.isclose(rates.errors().error_s, 100 * 4 + 100 * 2)
    rates.keep_only({"b"})
    assert rates.of("a", MODEL).prefill_s_per_byte.count == 0


def test_a_version_is_a_file_a_kv_type_and_an_arithmetic() -> None:
    versions = {
        version_of(engine(**change)) for change in ({}, {"digest": "f" * 64}, {"kv_type": "f32"}, {"numerics": 2})
    }
    assert len(versions) == 4
    assert version_of(engine(numerics=0)) == ""
