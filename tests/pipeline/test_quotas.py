"""API keys, and token buckets that give no tenant more than its rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.key_file import KeyLimits
from pipeline.api.keys import NO_LIMITS, Keys
from pipeline.api.quotas import Bucket, Quotas, duration
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
    assert len(quotas._counters) == 1


DAY = 86_400.0


class Tenants:
    """Quotas with one key of limits `own`, and their clock; both clocks are the same."""

    def __init__(self, own: KeyLimits, **limits: int) -> None:
        self.now = 20 * DAY
        self.quotas = Quotas(
            RateLimitsConfig(**limits), self.clock, None, self.clock, lambda key_id: own if key_id == "k" else NO_LIMITS
        )

    def clock(self) -> float:
        return self.now


def test_a_limit_of_a_key_replaces_that_of_its_tenant() -> None:
    one = Tenants(KeyLimits(requests_per_minute=2), requests_per_minute=1, tokens_per_minute=50)
    for _ in range(2):
        one.quotas.take_request("a", "k")
    with pytest.raises(RateLimited, match="quota of 2 requests per minute"):
        one.quotas.take_request("a", "k")
    one.quotas.take_request("a")  # the tenant's own bucket has not been touched
    with pytest.raises(RateLimited, match="quota of 1 requests per minute"):
        one.quotas.take_request("a", "another")
    one.quotas.take_prompt("a", 50, "k")  # a limit that the key does not have is its tenant's
    with pytest.raises(RateLimited, match="50 tokens per minute"):
        one.quotas.take_prompt("a", 1)


def test_zero_of_a_key_is_no_limit() -> None:
    one = Tenants(KeyLimits(requests_per_minute=0), requests_per_minute=1)
    for _ in range(100):
        one.quotas.take_request("a", "k")
    assert one.quotas.headers("a", "k") == {}


def test_a_day_ends_at_midnight_and_a_total_never() -> None:
    one = Tenants(KeyLimits(tokens_total=100), tokens_per_day=60)
    one.now += DAY / 4
    one.quotas.take_prompt("a", 50, "k")
    one.quotas.charge_output("a", 20, "k")
    with pytest.raises(RateLimited, match="60 tokens per day has 0 left") as day:
        one.quotas.take_prompt("a", 1, "k")
    assert (day.value.code, day.value.retry_after_s) == ("RATE_LIMITED", DAY * 3 / 4)
    one.now = 21 * DAY
    one.quotas.take_prompt("a", 30, "k")
    one.now = 22 * DAY
    with pytest.raises(RateLimited, match="100 tokens in total has 0 left") as total:
        one.quotas.take_prompt("a", 1, "k")
    assert total.value.code == "QUOTA_EXHAUSTED"
    assert total.value.headers() == {"x-should-retry": "false"}
    one.quotas.take_prompt("a", 60)  # the tenant's other keys go on
    with pytest.raises(RateLimited, match="tokens per day has 0 left"):
        one.quotas.take_prompt("a", 60)


def test_a_prompt_above_the_quota_of_a_day_is_not_to_be_tried_again() -> None:
    one = Tenants(NO_LIMITS, tokens_per_day=60)
    with pytest.raises(RateLimited) as refused:
        one.quotas.take_prompt("a", 61)
    assert refused.value.code == "QUOTA_EXHAUSTED"


def test_a_refusal_charges_no_limit() -> None:
    one = Tenants(KeyLimits(requests_per_day=10, requests_total=1))
    one.quotas.take_request("a", "k")
    for _ in range(20):
        with pytest.raises(RateLimited, match="1 requests in total"):
            one.quotas.take_request("a", "k")


def test_headers_show_the_nearest_limit() -> None:
    one = Tenants(KeyLimits(tokens_per_minute=600, tokens_per_day=1000, tokens_total=5000), requests_per_minute=60)
    assert one.quotas.headers("a", "k") == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0ms",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "0ms",
    }
    one.quotas.take_request("a", "k")
    one.quotas.take_prompt("a", 405, "k")
    found = one.quotas.headers("a", "k")
    assert (found["x-ratelimit-remaining-tokens"], found["x-ratelimit-reset-tokens"]) == ("195", "40.5s")
    assert (found["x-ratelimit-remaining-requests"], found["x-ratelimit-reset-requests"]) == ("59", "1s")
    one.now += 60
    one.quotas.charge_output("a", 500, "k")
    found = one.quotas.headers("a", "k")
    assert (found["x-ratelimit-limit-tokens"], found["x-ratelimit-remaining-tokens"]) == ("1000", "95")
    assert found["x-ratelimit-reset-tokens"] == "23h59m0s"


def test_a_total_that_is_nearest_has_no_reset() -> None:
    one = Tenants(KeyLimits(tokens_per_minute=600, tokens_total=500))
    one.quotas.charge_output("a", 600, "k")
    found = one.quotas.headers("a", "k")
    assert found == {"x-ratelimit-limit-tokens": "500", "x-ratelimit-remaining-tokens": "0"}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0ms"), (0.0192, "20ms"), (0.9999, "1000ms"), (1, "1s"), (8.64, "8.64s"), (60, "1m0s"), (3599.2, "1h0m0s")],
)
def test_durations_are_those_of_openai(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@given(st.lists(st.tuples(st.floats(0, DAY), st.integers(0, 40)), max_size=40), st.integers(1, 60))
def test_a_day_never_gives_more_than_its_quota(steps: list[tuple[float, int]], limit: int) -> None:
    one = Tenants(NO_LIMITS, tokens_per_day=limit)
    taken: dict[float, int] = {}
    for wait, amount in steps:
        one.now += wait
        try:
            one.quotas.take_prompt("a", amount)
        except RateLimited as refused:
            if not refused.retry_after_s:
                assert amount > limit
            continue
        day = one.now // DAY
        taken[day] = taken.get(day, 0) + amount
    assert all(amount <= limit for amount in taken.values())
