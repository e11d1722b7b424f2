"""API keys, and token buckets that give no tenant more than its rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.keys import Keys
from pipeline.api.quotas import Bucket, Quotas
from pipeline.config.schema import ApiKey, AuthConfig, Config, RateLimitsConfig
from pipeline.errors import RateLimited, Unauthenticated


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_without_keys_every_caller_is_the_default_tenant() -> None:
    keys = Keys(Config())
    assert keys.caller(None).tenant == "default"
    assert keys.caller("Bearer anything").tenant == "default"


def test_a_key_names_its_tenant() -> None:
    auth = AuthConfig(api_keys=(ApiKey(key="sk-a", tenant="a", priority=3), ApiKey(key="sk-b")))
    keys = Keys(Config(auth=auth))
    assert keys.caller("Bearer sk-a")[:2] == ("a", 3)
    assert keys.caller("bearer  sk-b ").tenant.startswith("key-")


@pytest.mark.parametrize("header", [None, "", "sk-a", "Basic sk-a", "Bearer", "Bearer sk-", "Bearer sk-aa"])
def test_an_invalid_key_is_rejected(header: str | None) -> None:
    with pytest.raises(Unauthenticated) as refused:
        Keys(Config(auth=AuthConfig(api_keys=(ApiKey(key="sk-a"),)))).caller(header)
    assert "sk-a" not in refused.value.message


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 200)), max_size=60), st.integers(1, 120))
def test_a_bucket_never_gives_more_than_its_rate(steps: list[tuple[float, int]], per_minute: int) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    taken: list[tuple[float, int]] = []
    for wait, amount in steps:
        clock.now += wait
        needed = bucket.wait_s(amount)
        if needed == 0:
            bucket.take(amount)
            taken.append((clock.now, amount))
        else:
            # Exactly after the returned time the amount is available.
            probe = clock.now
            clock.now += needed + 1e-6
            assert bucket.wait_s(amount) == 0
            clock.now = probe + needed
    for start in range(len(taken)):
        total = 0
        for at, amount in taken[start:]:
            total += amount
            # A window may contain a full bucket, its refill, and one request larger than the rest.
            refill = (at - taken[start][0]) * per_minute / 60
            assert total <= per_minute + refill + max(0, max(a for _, a in taken) - per_minute) + 1e-3


def test_output_is_charged_and_delays_later_requests() -> None:
    clock = Clock()
    quotas = Quotas(RateLimitsConfig(tokens_per_minute=60), clock)
    quotas.take_prompt("a", 10)
    quotas.charge_output("a", 80)
    with pytest.raises(RateLimited) as refused:
        quotas.take_prompt("a", 5)
    assert refused.value.retry_after_s == pytest.approx(35)
    assert refused.value.headers() == {"Retry-After": "35"}
    quotas.take_prompt("b", 5)
    clock.now += 35
    quotas.take_prompt("a", 5)


def test_a_prompt_above_the_rate_is_admitted_when_the_bucket_is_full() -> None:
    clock = Clock()
    quotas = Quotas(RateLimitsConfig(tokens_per_minute=60), clock)
    quotas.take_prompt("a", 100)
    with pytest.raises(RateLimited):
        quotas.take_prompt("a", 100)
    clock.now += 100
    quotas.take_prompt("a", 100)


def test_a_rejected_request_is_not_charged() -> None:
    clock = Clock()
    quotas = Quotas(RateLimitsConfig(requests_per_minute=2), clock)
    for _ in range(2):
        quotas.take_request("a")
    for _ in range(5):
        with pytest.raises(RateLimited):
            quotas.take_request("a")
    clock.now += 30
    quotas.take_request("a")


def test_full_buckets_are_dropped() -> None:
    clock = Clock()
    quotas = Quotas(RateLimitsConfig(requests_per_minute=60), clock)
    for index in range(Quotas.MAX_IDLE):
        quotas.take_request(f"t{index}")
    clock.now += 60
    quotas.take_request("late")
    assert len(quotas._requests) == 1
