"""Ids: every orchestrator with the fleet's secret derives the same, and only its tenant can use one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.request_name import read_request_name
from pipeline.errors import NotFound
from stages.orchestrator.request_ids import DRAWN_BYTES, MAX_PREPARED, RandomDigits, RequestIds


def ids(secret: str = "s" * 32, now: float = 1_700_000_000.5) -> RequestIds:
    return RequestIds(secret, lambda: now)


@given(st.text(max_size=20), st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_an_id_belongs_to_its_tenant(tenant: str, other: str, key: str) -> None:
    for made in (ids().new(tenant), ids().of_key(tenant, key)):
        assert ids(now=5.0).check(made, tenant) == made
        for wrong, who in ((made, other), (made[:-1] + ("0" if made[-1] != "0" else "1"), tenant), ("req-1", tenant)):
            if (wrong, who) != (made, tenant):
                with pytest.raises(NotFound):
                    ids().check(wrong, who)
        with pytest.raises(NotFound):
            ids("another secret").check(made, tenant)


def test_engines_get_the_salt_by_which_a_tenant_is_found() -> None:
    salts = {"a": "\x01a", "b": "\x01b", "c": "a group", "d": "a group", "e": ""}
    found = ids().tenants(salts)
    assert sorted(found.values()) == ["a", "b"]
    for name, salt in salts.items():
        given = read_request_name(ids().name(ids().new(name), is_keyed=False, salt=salt))
        assert given is not None and found.get(given.salt, "") == (name if name in "ab" else "")
    assert ids("another secret").tenants(salts).keys().isdisjoint(found)


def test_what_follows_from_an_id_is_the_same_everywhere() -> None:
    made = ids().new("tenant")
    assert ids(now=9.0).name(made, is_keyed=False, salt="") == ids().name(made, is_keyed=False, salt="")
    assert "; created=1700000000; seed=" in ids().name(made, is_keyed=False, salt="")
    assert ids().name(made, is_keyed=False, salt="\x01a") != ids().name(made, is_keyed=False, salt="\x01b")
    assert ids().of_key("tenant", "k") == ids(now=1.0).of_key("tenant", "k") != ids().of_key("tenant", "l")
    assert ids().new("tenant") != made


def test_a_prepared_id_is_used_once_by_its_tenant_in_its_second() -> None:
    now = [1_700_000_000.2]
    made, plain = RequestIds("s" * 32, lambda: now[0]), ids()
    for tenant in ("a", "b"):
        made.prepare(tenant)
    now[0] += 0.7
    names = {}
    for tenant in ("a", "b", "a"):
        request_id = made.new(tenant)
        assert plain.check(request_id, tenant) == request_id and request_id not in names
        names[request_id] = made.name(request_id, is_keyed=False, salt="")
    for request_id, name in names.items():  # also of one that is not the last
        assert name == plain.name(request_id, is_keyed=False, salt="") == made.name(request_id, is_keyed=False, salt="")
        assert "; created=1700000000; " in name
    made.prepare("a")
    now[0] += 0.2
    assert "; created=1700000001; " in made.name(made.new("a"), is_keyed=False, salt="")


def test_only_so_many_ids_are_prepared() -> None:
    drawn: list[int] = []

    def draw(n_bytes: int) -> str:
        drawn.append(n_bytes)
        return f"{len(drawn):0{2 * n_bytes}x}"

    made = RequestIds("s" * 32, lambda: 1.0, draw)
    for number in range(3 * MAX_PREPARED):
        made.prepare(f"t{number}")
    assert len(drawn) == 3 * MAX_PREPARED
    for number in range(3 * MAX_PREPARED):
        made.new(f"t{number}")
    assert len(drawn) >= 5 * MAX_PREPARED  # at least two thirds of them were not prepared


def test_random_digits_do_not_repeat() -> None:
    draw = RandomDigits()
    drawn = [draw(5) for _ in range(2 * DRAWN_BYTES)]
    assert len(set(drawn)) == len(drawn) and {len(one) for one in drawn} == {10}
    assert len(draw(DRAWN_BYTES + 1)) == 2 * DRAWN_BYTES + 2
