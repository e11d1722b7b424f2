"""Idempotency keys: one request for each key, bounds for each tenant and in all, and a time to live."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.idempotency_key import read_key
from pipeline.config.load import resolve
from pipeline.errors import Conflict, InvalidRequest, Overloaded
from stages.gateway.requests.idempotency import KEY_BYTES, Claim, IdempotencyKeys
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.service import Service
from tests.gateway.peers import MODEL
from tests.gateway.request_states import make_spec

TTL_S = 600.0
DIGEST = b"d" * 32


class Table:
    """The keys with a clock of the test; counts what was dropped."""

    def __init__(self, tenant_bytes: int = 1 << 20, max_bytes: int = 1 << 20) -> None:
        self.now = 0.0
        self.dropped: list[str] = []
        self.keys = IdempotencyKeys(lambda: self.now, TTL_S, tenant_bytes, max_bytes)
        self.keys.on_drop = self.dropped.append

    async def start(self, name: str, key: str, tenant: str = "a") -> RequestSpec:
        _, is_new = await self.keys.claim(tenant, key, DIGEST)
        assert is_new
        spec = make_spec(name, tenant=tenant, idempotency_key=key, body_digest=DIGEST)
        self.keys.run(spec)
        return spec

    async def named(self, key: str, tenant: str = "a") -> str:
        """The request that a repetition gets; "" if it is a new one, which is then given up."""
        claim, is_new = await self.keys.claim(tenant, key, DIGEST)
        if is_new:
            self.keys.release(claim)
        return claim.request_id


async def test_a_key_names_its_request_while_it_runs_and_until_its_answer_expires() -> None:
    table = Table()
    spec = await table.start("req-1", "k")
    table.now = 10_000.0
    table.keys.expire()
    assert await table.named("k") == "req-1"
    assert table.keys.keep(spec, 100)
    table.now += TTL_S - 1
    table.keys.expire()
    assert await table.named("k") == "req-1"
    table.now += 1
    table.keys.expire()
    assert await table.named("k") == ""
    assert (table.dropped, len(table.keys), table.keys.bytes) == (["req-1"], 0, 0)


async def test_an_answer_that_is_generated_again_does_not_expire_meanwhile() -> None:
    table = Table()
    spec = await table.start("req-1", "k")
    assert table.keys.keep(spec, 100)
    table.keys.run_again(spec)
    table.now = TTL_S + 1
    table.keys.expire()
    assert await table.named("k") == "req-1"
    assert table.keys.keep(spec, 100)
    assert table.keys.bytes == KEY_BYTES + 100


@pytest.mark.parametrize(
    ("age_s", "until"), [(0.0, TTL_S), (-1e9, TTL_S), (500.0, 100.0), (TTL_S, 0.0), (math.nan, TTL_S)]
)
async def test_an_answer_from_the_journal_has_the_rest_of_its_time(age_s: float, until: float) -> None:
    table = Table()
    spec = await table.start("req-1", "k")
    assert table.keys.keep(spec, 100, age_s) == (until > 0)
    for table.now in (until - 1, until):
        table.keys.expire()
        assert table.keys.holds("a", "k") == (table.now < until and until > 0)


async def test_another_body_is_a_conflict_for_this_tenant_only() -> None:
    table = Table()
    await table.start("req-1", "k")
    with pytest.raises(Conflict, match="another body"):
        await table.keys.claim("a", "k", b"other")
    _, is_new = await table.keys.claim("b", "k", b"other")
    assert is_new


@pytest.mark.parametrize("is_admitted", [True, False])
async def test_a_second_attempt_waits_for_the_admission_of_the_first(is_admitted: bool) -> None:
    table = Table()
    first, _ = await table.keys.claim("a", "k", DIGEST)
    second = asyncio.create_task(table.keys.claim("a", "k", DIGEST))
    third = asyncio.create_task(table.keys.claim("a", "k", DIGEST))
    await asyncio.sleep(0)
    assert not second.done()
    if is_admitted:
        table.keys.run(make_spec("req-1", tenant="a", idempotency_key="k", body_digest=DIGEST))
        assert (await second)[0].request_id == (await third)[0].request_id == "req-1"
        return
    table.keys.release(first)
    done, waiting = await asyncio.wait({second, third}, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result()[1] for task in done] == [True], "one of them is the next attempt, the other one waits for it"
    table.keys.run(make_spec("req-2", tenant="a", idempotency_key="k", body_digest=DIGEST))
    assert [(await task)[0].request_id for task in waiting] == ["req-2"]


async def test_a_failed_request_frees_its_key_and_only_its_own() -> None:
    table = Table()
    spec = await table.start("req-1", "k")
    table.keys.forget(spec)
    await table.start("req-2", "k")
    table.keys.forget(spec)
    assert not table.keys.keep(spec, 1)
    assert await table.named("k") == "req-2"


async def test_nothing_is_kept_of_tenants_without_keys() -> None:
    table = Table()
    for number in range(20):
        assert await table.named("k", f"released-{number}") == ""
        spec = await table.start(f"req-{number}", "k", f"answered-{number}")
        table.keys.run_again(spec)
        assert table.keys.keep(spec, 1)
    table.now += TTL_S
    table.keys.expire()
    assert (len(table.keys), dict(table.keys._answered), dict(table.keys._of_tenant)) == (0, {}, {})


async def test_the_oldest_answers_of_the_tenant_make_room_and_running_requests_never_do() -> None:
    table = Table(tenant_bytes=4 * KEY_BYTES)
    other = await table.start("req-other", "k", tenant="b")
    assert table.keys.keep(other, KEY_BYTES)
    for number in range(3):
        spec = await table.start(f"req-{number}", f"k{number}")
        assert table.keys.keep(spec, KEY_BYTES)
    assert table.dropped == ["req-0"]
    for number in range(3, 7):
        await table.start(f"req-{number}", f"k{number}")
    assert table.dropped == ["req-0", "req-1", "req-2"]
    with pytest.raises(Overloaded, match=r"server\.idempotency_tenant_mb"):
        await table.keys.claim("a", "k7", DIGEST)
    assert await table.named("k", "b") == "req-other"


async def test_the_largest_tenant_makes_room_when_all_together_reach_the_bound() -> None:
    table = Table(tenant_bytes=6 * KEY_BYTES, max_bytes=8 * KEY_BYTES)
    for number in range(6):
        assert table.keys.keep(await table.start(f"req-{number}", f"k{number}"), 0)
    for number in range(3):
        assert table.keys.keep(await table.start(f"other-{number}", f"k{number}", tenant="b"), 0)
    assert table.dropped == ["req-0"]


async def test_an_answer_over_the_bound_frees_its_key() -> None:
    table = Table(tenant_bytes=4 * KEY_BYTES)
    spec = await table.start("req-1", "k")
    assert not table.keys.keep(spec, 4 * KEY_BYTES)
    assert await table.named("k") == ""


def test_the_configured_bounds_and_time_are_in_force() -> None:
    now, mib = 100.0, 1 << 20
    bounds = {"idempotency_ttl_s": 700, "idempotency_tenant_mb": 3, "idempotency_mb": 4}
    config = resolve({"models": [{"name": MODEL, "path": "m.gguf"}], "server": bounds}, {})
    service = Service(config, lambda frame: True, lambda frame: True, clock=lambda: now)
    keys = service.recovery.keys

    def answered(name: str, size: int, tenant: str = "a", age_s: float = 0.0) -> bool:
        spec = make_spec(name, tenant=tenant, idempotency_key=name, body_digest=DIGEST)
        keys.run(spec)
        return keys.keep(spec, size, age_s)

    assert not answered("req-old", 1, age_s=700)
    assert not answered("req-large", 3 * mib)
    assert answered("req-1", 2 * mib)
    assert answered("req-2", mib // 2)
    assert answered("req-3", mib, "b")
    assert (len(keys), keys.evicted) == (3, 0)
    assert answered("req-4", mib)  # the tenant has one of 2 MiB less
    assert (len(keys), keys.evicted, keys.holds("a", "req-1")) == (3, 1, False)
    assert answered("req-5", 7 * mib // 4, "b")  # all tenants together have one less
    assert (len(keys), keys.evicted, keys.holds("a", "req-2")) == (3, 2, False)
    now += 699
    service.recovery.keys.expire()
    assert len(keys) == 3
    now += 1
    service.recovery.keys.expire()
    assert len(keys) == 0


def test_a_malformed_key_is_refused() -> None:
    assert read_key(None) == ""
    assert read_key("7c9e6679-7425") == "7c9e6679-7425"
    for wrong in ("", "a b", "é", "x" * 129, "a\t"):
        with pytest.raises(InvalidRequest, match="Idempotency-Key"):
            read_key(wrong)


Step = st.tuples(
    st.sampled_from(["claim", "run", "keep", "forget", "release", "pass", "again"]),
    st.integers(0, 5),
    st.sampled_from("ab"),
    st.integers(0, 3 * KEY_BYTES),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(Step, max_size=60))
def test_bounds_hold_and_every_byte_is_accounted_for(steps: list[tuple[str, int, str, int]]) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int, str, int]]) -> None:
    table = Table(tenant_bytes=5 * KEY_BYTES, max_bytes=8 * KEY_BYTES)
    keys = table.keys
    held: dict[tuple[str, str], Claim] = {}
    specs: dict[tuple[str, str], RequestSpec] = {}
    for number, (action, which, tenant, size) in enumerate(steps):
        at = (tenant, f"k{which}")
        if action == "claim" and (at not in held or held[at].request_id):
            try:
                claim, is_new = await keys.claim(*at, DIGEST)
            except Overloaded:
                continue
            if is_new:
                held[at] = claim
        elif action == "run" and at in held and not held[at].request_id:
            specs[at] = make_spec(f"req-{number}", tenant=tenant, idempotency_key=at[1], body_digest=DIGEST)
            keys.run(specs[at])
        elif action == "release" and at in held and not held[at].request_id:
            keys.release(held.pop(at))
        elif at in specs and action == "keep":
            keys.keep(specs[at], size)
        elif at in specs and action == "forget":
            keys.forget(specs[at])
        elif at in specs and action == "again":
            keys.run_again(specs[at])
        elif action == "pass":
            table.now += size
            keys.expire()
        sizes: Counter[str] = Counter()
        for (owner, _), claim in keys._claims.items():
            sizes[owner] += claim.size
        assert keys.bytes == sizes.total() <= 8 * KEY_BYTES
        assert all(n <= 5 * KEY_BYTES for n in sizes.values())
        assert {t: n for t, n in keys._of_tenant.items() if n} == dict(sizes)


class Ordered(Table):
    """Checks at each drop that no answer of the tenant expires earlier than the one that is dropped."""

    def __init__(self) -> None:
        super().__init__(tenant_bytes=5 * KEY_BYTES, max_bytes=8 * KEY_BYTES)
        self.until: dict[str, float] = {}  # of answered requests, by name
        self.specs: dict[str, RequestSpec] = {}
        self.keys.on_drop = self.check_drop

    def check_drop(self, name: str) -> None:
        until, tenant = self.until.pop(name), self.specs[name].tenant
        assert all(until <= other for one, other in self.until.items() if self.specs[one].tenant == tenant)

    def keep(self, spec: RequestSpec, size: int, answered: float) -> None:
        assert self.keys.keep(spec, size, self.now - answered) or self.now - answered >= TTL_S
        if self.keys.keeps(spec):
            self.until[spec.id] = answered + TTL_S


Reading = st.tuples(
    st.sampled_from(["answer", "again", "put back", "pass"]),
    st.integers(0, 3),  # which key, or which answer
    st.integers(0, KEY_BYTES),  # bytes of the answer
    st.sampled_from([0.1, 0.25, 0.5]),  # of `TTL_S` that pass
)


@settings(deadline=None, max_examples=300)
@given(st.lists(Reading, min_size=3, max_size=30))
def test_answers_are_forgotten_in_the_order_of_their_time(steps: list[tuple[str, int, int, float]]) -> None:
    table = Ordered()
    answered: dict[str, float] = {}
    woken: dict[str, float] = {}
    first = [("answer", which, KEY_BYTES // 4, 0.1) for which in range(4)]
    for number, (action, which, size, passed) in enumerate([*first, *steps]):
        tenant = "ab"[which // 3]
        if action == "answer" and not table.keys.holds(tenant, f"k{which}"):
            spec = make_spec(f"req-{number}", tenant=tenant, idempotency_key=f"k{which}", body_digest=DIGEST)
            table.specs[spec.id] = spec
            table.keys.run(spec)
            table.now += passed * TTL_S
            table.keep(spec, size, table.now)
            answered[spec.id] = table.now
        elif action == "again" and table.until:
            name = min(table.until, key=answered.__getitem__) if which else max(table.until)
            table.keys.run_again(table.specs[name])
            woken[name] = answered[name]
            del table.until[name]
        elif action == "put back" and woken:
            name = sorted(woken)[which % len(woken)]
            table.keep(table.specs[name], size, woken.pop(name))
        elif action == "pass":
            table.now += passed * TTL_S
            table.keys.expire()
            assert all(until > table.now for until in table.until.values())
        assert {spec.id for spec in table.specs.values() if table.keys.keeps(spec)} == {*table.until, *woken}


async def test_an_answer_that_is_put_back_expires_before_later_ones() -> None:
    table = Table()
    specs = [await table.start(f"req-{name}", name) for name in "abc"]
    for spec, table.now in zip(specs, (0.0, 100.0, 200.0), strict=True):
        assert table.keys.keep(spec, 100)
    table.keys.run_again(specs[0])
    assert table.keys.keep(specs[0], 100, table.now)
    for table.now, dropped in ((TTL_S, ["req-a"]), (TTL_S + 100, ["req-a", "req-b"])):
        table.keys.expire()
        assert table.dropped == dropped
